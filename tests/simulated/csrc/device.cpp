// What torch asks of a kind of devices: how to switch them and their streams, what events are, and
// generators of random numbers. And what Python asks for besides.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "machine.h"

namespace sim {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (0 <= device.index() && device.index() < kDevices) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return pooled_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return pooled_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return reached(mark(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(mark(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark();
    at(*event) = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream, at(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || reached(at(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(at(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(reached(at(start)) && reached(at(end)), "Both events must be completed");
    return at(end).time - at(start).time;
  }

 private:
  static Mark& at(void* event) { return *static_cast<Mark*>(event); }
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(kSim, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = new std::vector<at::Generator>{
      new_generator(0), new_generator(1), new_generator(2), new_generator(3)};
  return made->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }

  bool isPinnedPtr(const void* data) const override { return pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// An operator for each thing that Python asks for: no other binding is needed.
TORCH_LIBRARY(sim, m) {
  m.def("sleep", [](double ms, int64_t device) { launch(current_stream(device), ms); });
  m.def("reports", &reports);
  m.def("forbid_waits", &forbid_implicit_waits);
  m.def("generator", [](int64_t device) { return default_generator(device); });
  m.def("set_capacity", [](int64_t device, int64_t bytes) { set_capacity(device, bytes); });
  m.def("free_memory", [](int64_t device) { return free_memory(device); });
}

}  // namespace
}  // namespace sim
