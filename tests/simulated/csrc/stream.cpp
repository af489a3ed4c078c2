#include "stream.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

namespace sim {

void Mark::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  reached_ = true;
  changed_.notify_all();
}

bool Mark::reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

double Mark::milliseconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::chrono::duration<double, std::milli>(when_.time_since_epoch()).count();
}

namespace {

struct Job {
  Kind kind;
  std::function<void()> run;
};

// What kernels threw, by device, until the host waits for the device.
class Failures {
 public:
  void keep(c10::DeviceIndex device, std::string what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_[device].empty()) kept_[device] = std::move(what);
  }
  std::string take(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(kept_[device], std::string());
  }

 private:
  std::mutex mutex_;
  std::array<std::string, kDevices> kept_;
};

Failures& failures() {
  static auto* instance = new Failures();  // leaked: threads and tensors may outlive statics
  return *instance;
}

class Queue {
 public:
  explicit Queue(c10::DeviceIndex device) : device_(device) {}

  void append(Kind kind, std::function<void()> job) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) {  // the process is ending, and there is no thread any more
      lock.unlock();
      job();
      return;
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    jobs_.push_back({kind, std::move(job)});
    changed_.notify_one();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.empty() && !busy_;
  }

  void set_delay(double ms, double probability, uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_ms_ = ms;
    probability_ = probability;
    random_.seed(seed);
  }

  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      changed_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = job.kind != Kind::kMark;  // who has waited for it finds the stream idle
      const double ms = job.kind == Kind::kKernel ? draw_delay() : 0;
      lock.unlock();
      if (ms > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
      try {
        job.run();
      } catch (const c10::Error& error) {
        failures().keep(device_, error.what_without_backtrace());
      } catch (const std::exception& error) {
        failures().keep(device_, error.what());
      } catch (...) {
        failures().keep(device_, "unknown error");
      }
      job.run = nullptr;  // what it holds goes outside of the lock
      lock.lock();
      busy_ = false;
    }
  }

  // A fixed delay for each kernel, or for some of them a random one up to twice as long.
  double draw_delay() {
    if (delay_ms_ <= 0 || probability_ >= 1) return delay_ms_;
    std::uniform_real_distribution<double> uniform(0, 1);
    if (uniform(random_) >= probability_) return 0;
    return 2 * delay_ms_ * uniform(random_);
  }

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false;
  bool closed_ = false;
  double delay_ms_ = 0;
  double probability_ = 1;
  std::mt19937_64 random_;
  std::thread thread_;
};

class Machine {
 public:
  Machine() {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      for (c10::StreamId id = 0; id < kStreams; ++id) {
        queues_[device].push_back(std::make_unique<Queue>(device));
      }
    }
  }
  Queue& at(c10::DeviceIndex device, c10::StreamId id) {
    TORCH_CHECK(0 <= device && device < kDevices, "invalid device ordinal: sim:", int(device));
    TORCH_CHECK(0 <= id && id < kStreams, "no such stream of sim:", int(device), ": ", id);
    return *queues_[device][id];
  }
  std::array<std::atomic<uint64_t>, kDevices> handed_out{};

 private:
  std::array<std::vector<std::unique_ptr<Queue>>, kDevices> queues_;
};

std::atomic<bool> forked{false};

Machine& machine() {
  static auto* instance = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return new Machine();
  }();
  return *instance;
}

Queue& queue(c10::Stream stream) {
  check_process();
  return machine().at(stream.device_index(), stream.id());
}

thread_local c10::DeviceIndex here = 0;
thread_local std::array<c10::StreamId, kDevices> currents{};

struct Waits {
  std::mutex mutex;
  bool forbidden = false;
  std::map<std::string, int64_t> counts;
};

Waits& waits() {
  static auto* instance = new Waits();
  return *instance;
}

struct Held {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, Place> places;
};

Held& held() {
  static auto* instance = new Held();
  return *instance;
}

void raise_failure(c10::DeviceIndex device) {
  const std::string what = failures().take(device);
  TORCH_CHECK(what.empty(), "a kernel failed on sim:", int(device), ": ", what);
}

}  // namespace

c10::DeviceIndex current_device() { return here; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < kDevices, "invalid device ordinal: sim:", int(device));
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
  check_process();
  return stream_of(device, 1 + machine().handed_out.at(device)++ % (kStreams - 1));
}

void enqueue(c10::Stream stream, Kind kind, std::function<void()> job) {
  queue(stream).append(kind, std::move(job));
}

Place mark(c10::Stream stream) {
  auto place = std::make_shared<Mark>();
  enqueue(stream, Kind::kMark, [place] { place->reach(); });
  return place;
}

void wait_on_stream(c10::Stream stream, const Place& place) {
  enqueue(stream, Kind::kHousekeeping, [place] { place->wait(); });
}

bool idle(c10::Stream stream) { return queue(stream).idle(); }

void synchronize(const Place& place, c10::DeviceIndex device) {
  place->wait();
  raise_failure(device);
}

void synchronize(c10::Stream stream) { synchronize(mark(stream), stream.device_index()); }

void synchronize_device(c10::DeviceIndex device) {
  std::vector<Place> places;
  for (c10::StreamId id = 0; id < kStreams; ++id) {
    const c10::Stream stream = stream_of(device, id);
    if (!idle(stream)) places.push_back(mark(stream));
  }
  for (const Place& place : places) place->wait();
  raise_failure(device);
}

void implicit_wait(c10::Stream stream, const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(waits().mutex);
    ++waits().counts[reason];
    TORCH_CHECK(!waits().forbidden, "the host must not wait for ", stream, " here: ", reason);
  }
  synchronize(stream);
}

void forbid_implicit_waits(bool forbid) {
  std::lock_guard<std::mutex> lock(waits().mutex);
  waits().forbidden = forbid;
}

std::string implicit_waits() {
  std::lock_guard<std::mutex> lock(waits().mutex);
  std::ostringstream lines;
  for (const auto& [reason, count] : waits().counts) lines << reason << '\t' << count << '\n';
  return lines.str();
}

void forget_implicit_waits() {
  std::lock_guard<std::mutex> lock(waits().mutex);
  waits().counts.clear();
}

void set_delay(int64_t device, int64_t stream, double ms, double probability, int64_t seed) {
  for (c10::DeviceIndex d = 0; d < kDevices; ++d) {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      if ((device < 0 || device == d) && (stream < 0 || stream == id)) {
        queue(stream_of(d, id)).set_delay(ms, probability, (seed * kDevices + d) * kStreams + id);
      }
    }
  }
}

int64_t hold(c10::Stream stream) {
  auto place = std::make_shared<Mark>();
  wait_on_stream(stream, place);
  std::lock_guard<std::mutex> lock(held().mutex);
  held().places[held().next] = place;
  return held().next++;
}

void release(int64_t which) {
  std::lock_guard<std::mutex> lock(held().mutex);
  auto found = held().places.find(which);
  if (found == held().places.end()) return;
  found->second->reach();
  held().places.erase(found);
}

void check_process() {
  TORCH_CHECK(
      !forked, "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, "
      "you must use the 'spawn' start method");
}

bool bad_fork() { return forked; }

void shut_down() {
  if (forked) return;
  {
    std::lock_guard<std::mutex> lock(held().mutex);
    for (auto& [which, place] : held().places) place->reach();
  }
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      const c10::Stream stream = stream_of(device, id);
      if (!idle(stream)) mark(stream)->wait();  // it may wait for others that are not closed yet
    }
  }
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    for (c10::StreamId id = 0; id < kStreams; ++id) machine().at(device, id).close();
  }
}

}  // namespace sim
