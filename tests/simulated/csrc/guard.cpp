// Tells torch how to switch devices and streams, and what events are.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {
namespace {

struct Event {
  c10::DeviceIndex device;
  Place place;
};

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
  c10::DeviceIndex deviceCount() const noexcept override { return bad_fork() ? 0 : kDevices; }

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
  bool queryStream(const c10::Stream& stream) const override { return idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    Place place = mark(stream);
    if (*event == nullptr) {
      *event = new Event{stream.device_index(), std::move(place)};
    } else {
      *static_cast<Event*>(*event) = {stream.device_index(), std::move(place)};
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_on_stream(stream, static_cast<Event*>(event)->place);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->place->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event copy = *static_cast<Event*>(event);
    synchronize(copy.place, copy.device);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const Place from = static_cast<Event*>(start)->place;
    const Place to = static_cast<Event*>(end)->place;
    TORCH_CHECK(from->reached() && to->reached(), "Both events must be completed");
    return to->milliseconds() - from->milliseconds();
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sim
