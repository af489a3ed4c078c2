// Streams of the simulated devices: queues with a thread each, and marks in them.
//
// The host appends jobs; the stream's thread runs them in order, one at a time. A mark is a place
// in a queue: it is reached when all that was appended before it is done. Everything asynchronous
// (kernels, copies, events, the reuse of memory) is made of these two.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;
// As on CUDA: the default stream, and a pool that is handed out round robin.
constexpr c10::StreamId kStreams = 33;

class Mark {
 public:
  void reach();
  bool reached();
  void wait();  // blocks the calling thread
  double milliseconds();  // on the host's clock, when it was reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

using Place = std::shared_ptr<Mark>;

// The calling thread's device and streams.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream pooled_stream(c10::DeviceIndex device);

// What a job is: faults (delays) strike kernels only.
enum class Kind { kKernel, kHousekeeping, kMark };

void enqueue(c10::Stream stream, Kind kind, std::function<void()> job);
Place mark(c10::Stream stream);
void wait_on_stream(c10::Stream stream, const Place& place);  // the stream waits, not the host
bool idle(c10::Stream stream);

// The host waits. What a kernel threw in the meantime is thrown here, once.
void synchronize(const Place& place, c10::DeviceIndex device);
void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);

// The same, where the user did not ask for it: an operator needs data on the host. Counted, and
// an error while such waits are forbidden.
void implicit_wait(c10::Stream stream, const std::string& reason);
void forbid_implicit_waits(bool forbid);
std::string implicit_waits();  // "reason\tcount" a line
void forget_implicit_waits();

// Faults on purpose. A device or stream of -1 means all of them.
void set_delay(int64_t device, int64_t stream, double ms, double probability, int64_t seed);
int64_t hold(c10::Stream stream);  // it stops here until released
void release(int64_t held);

void check_process();  // throws in a forked child
bool bad_fork();
void shut_down();  // runs what is queued, then ends all threads

}  // namespace sim
