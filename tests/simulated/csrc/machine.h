// Simulated devices: their streams, their memory, and who has waited for whom.
//
// A kernel runs at once, on the host, so its numbers are right whatever its stream should have
// waited for. What is simulated is the order that streams promise. Each counts its kernels, and knows
// up to which kernel of each other stream it has waited (a vector clock):
//
//   read         must come after the last write                            (else: a race)
//   write        must come after the last write and all reads              (else: a race)
//   allocation   on a stream may get the memory of whatever was allocated there and is gone, so it
//                must come after all uses of that, but on streams that were recorded
//                                                           (else: memory that is reused too early)
//
// Time is the machine's own: a kernel takes a microsecond, a sleep as long as it says, and the host
// takes none, so a busy host measures what an idle one does. An event has happened when the host
// has waited for it, or for what comes later.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <mutex>
#include <string>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;
// As on CUDA: the default stream, and a pool that is handed out round robin.
constexpr c10::StreamId kStreams = 33;

// For each stream of all devices the number of a kernel: it and those before it are known.
using Clock = std::array<uint64_t, kDevices * kStreams>;

void join(Clock& clock, const Clock& other);

// What a stream has been given so far, and when that is done.
struct Mark {
  Clock clock{};
  double time = 0;  // in milliseconds
};

// Guards clocks and memory; never held while a kernel runs.
using Lock = std::unique_lock<std::recursive_mutex>;
Lock locked();
// The place of a stream in clocks.
size_t number(c10::Stream stream);
const Clock& clock_of(c10::Stream stream);
// What the host has waited for, in any thread: all that it launches comes after it.
const Clock& known_to_host();

// The calling thread's device and streams.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream pooled_stream(c10::DeviceIndex device);

void launch(c10::Stream stream, double ms = 1e-3);  // one more kernel
Mark mark(c10::Stream stream);
void wait(c10::Stream stream, const Mark& mark);  // the stream waits, not the host
bool reached(const Mark& mark);

void synchronize(const Mark& mark);  // the host waits
void synchronize_device(c10::DeviceIndex device);

// The same, where the user did not ask for it: an operator needs data on the host. An error while
// such waits are forbidden.
void implicit_wait(c10::Stream stream, const std::string& reason);
void forbid_implicit_waits(bool forbid);

void report(std::string what);  // something is in the wrong order
std::string reports();          // a line each, since the last call

// ---- Memory ------------------------------------------------------------------------------------

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool pinned(const void* data);
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void set_capacity(c10::DeviceIndex device, int64_t bytes);
int64_t free_memory(c10::DeviceIndex device);

// The last kernel that was launched on a stream uses memory of a device, or pinned memory.
void use(const void* data, size_t bytes, c10::Stream stream, bool write, const char* kernel);
// A copy to pinned memory is on its way: until the host has waited there are NaNs.
void arrive_later(void* data, size_t bytes, c10::Stream stream);
void arrive();  // what the host has waited for by now
// Another stream reads pinned memory, in its own order.
void arrive_now(const void* data);

}  // namespace sim
