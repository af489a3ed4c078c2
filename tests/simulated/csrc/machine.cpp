#include "machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <sstream>

namespace sim {
namespace {

struct Machine {
  std::recursive_mutex mutex;
  std::array<Mark, kDevices * kStreams> streams;
  std::array<uint64_t, kDevices> handed_out{};
  Mark host;
  bool waits_are_forbidden = false;
  std::set<std::string> reports;
};

Machine& machine() {
  static auto* instance = new Machine();  // leaked: threads and tensors may outlive statics
  return *instance;
}

thread_local c10::DeviceIndex here = 0;
thread_local std::array<c10::StreamId, kDevices> currents{};

void join(Mark& mark, const Mark& other) {
  sim::join(mark.clock, other.clock);
  mark.time = std::max(mark.time, other.time);
}

Mark& state(c10::Stream stream) { return machine().streams[number(stream)]; }

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < kDevices, "invalid device ordinal: sim:", int(device));
}

}  // namespace

Lock locked() { return Lock(machine().mutex); }

void join(Clock& clock, const Clock& other) {
  for (size_t k = 0; k < clock.size(); ++k) clock[k] = std::max(clock[k], other[k]);
}

size_t number(c10::Stream stream) {
  check_device(stream.device_index());
  TORCH_CHECK(0 <= stream.id() && stream.id() < kStreams, "no such stream: ", stream);
  return stream.device_index() * kStreams + stream.id();
}

const Clock& clock_of(c10::Stream stream) { return state(stream).clock; }

const Clock& known_to_host() { return machine().host.clock; }

c10::DeviceIndex current_device() { return here; }

void set_current_device(c10::DeviceIndex device) {
  check_device(device);
  here = device;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, currents.at(device)); }

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  currents.at(stream.device_index()) = stream.id();
  return before;
}

c10::Stream pooled_stream(c10::DeviceIndex device) {
  const Lock lock = locked();
  return stream_of(device, 1 + machine().handed_out.at(device)++ % (kStreams - 1));
}

void launch(c10::Stream stream, double ms) {
  const Lock lock = locked();
  join(state(stream), machine().host);
  state(stream).time += ms;
  ++state(stream).clock[number(stream)];
}

Mark mark(c10::Stream stream) {
  const Lock lock = locked();
  join(state(stream), machine().host);
  return state(stream);
}

void wait(c10::Stream stream, const Mark& mark) {
  const Lock lock = locked();
  join(state(stream), mark);
}

bool reached(const Mark& mark) {
  const Lock lock = locked();
  Clock clock = known_to_host();
  join(clock, mark.clock);
  return clock == known_to_host();
}

void synchronize(const Mark& mark) {
  const Lock lock = locked();
  join(machine().host, mark);
  arrive();
}

void synchronize_device(c10::DeviceIndex device) {
  for (c10::StreamId id = 0; id < kStreams; ++id) synchronize(mark(stream_of(device, id)));
}

void implicit_wait(c10::Stream stream, const std::string& reason) {
  {
    const Lock lock = locked();
    TORCH_CHECK(
        !machine().waits_are_forbidden, "the host must not wait for ", stream, " here: ", reason);
  }
  synchronize(mark(stream));
}

void forbid_implicit_waits(bool forbid) {
  const Lock lock = locked();
  machine().waits_are_forbidden = forbid;
}

void report(std::string what) {
  const Lock lock = locked();
  machine().reports.insert(std::move(what));
}

std::string reports() {
  const Lock lock = locked();
  std::ostringstream lines;
  for (const std::string& what : machine().reports) lines << what << '\n';
  machine().reports.clear();
  return lines.str();
}

}  // namespace sim
