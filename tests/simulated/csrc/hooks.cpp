// The simulated devices as torch.accelerator sees them, and what Python needs besides.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include "memory.h"
#include "random.h"

#include <thread>

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !bad_fork(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return !bad_fork(); }
  void init() const override { check_process(); }

  c10::DeviceIndex deviceCount() const override { return bad_fork() ? 0 : kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(device);
    return before;
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

void sleep(double ms, int64_t device) {
  const auto index = c10::DeviceIndex(device < 0 ? current_device() : device);
  enqueue(current_stream(index), Kind::kHousekeeping, [ms] {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
  });
}

// An operator for each thing that Python asks for: no other binding is needed.
TORCH_LIBRARY(sim, m) {
  m.def("shut_down", &shut_down);
  m.def("is_bad_fork", &bad_fork);
  m.def("sleep", &sleep);
  m.def("set_delay", &set_delay);
  m.def("hold_stream", [](int64_t device, int64_t id) { return hold(stream_of(device, id)); });
  m.def("release", &release);
  m.def("forbid_waits", &forbid_implicit_waits);
  m.def("waits", &implicit_waits);
  m.def("forget_waits", &forget_implicit_waits);
  m.def("generator", [](int64_t device) { return default_generator(device); });
  m.def("set_capacity", [](int64_t device, int64_t bytes) { set_capacity(device, bytes); });
  m.def("free_memory", [](int64_t device) { return free_memory(device); });
}

}  // namespace
}  // namespace sim
