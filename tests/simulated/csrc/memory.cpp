// As CUDA's caching allocator does it: a block belongs to the stream on which it was allocated.
// Handed back, it can be handed out again on that stream at once, whatever other streams still do
// with it, unless they were recorded. Then it has to wait for the places at which these streams
// were when it was handed back.
//
// The strictest thing that may happen to memory that was handed back is that the next kernel on
// its stream overwrites it. So that is what happens: it is filled with NaN, in stream order.
#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <vector>

namespace sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512;
constexpr int kNaN = 0xFF;  // in every floating point type, and -1 in integers

void* system_memory(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "the host has no memory left");
  std::memset(data, kNaN, bytes);
  return data;
}

struct Block {
  void* data;
  size_t size;  // what the system gave
  size_t rounded = 0;  // what counts
  size_t requested = 0;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> others = {};  // recorded streams
  std::vector<Place> pending = {};  // where these were when it was handed back
};

bool all_reached(const std::vector<Place>& places) {
  for (const Place& place : places) {
    if (!place->reached()) return false;
  }
  return true;
}

struct DeviceMemory {
  std::mutex mutex;
  std::map<c10::StreamId, std::multimap<size_t, Block*>> free;
  std::list<Block*> pending;
  DeviceStats stats;
  size_t capacity = size_t(4) << 30;
};

void grow(c10::CachingAllocator::StatArray& stat, size_t amount) { stat[0].increase(amount); }
void shrink(c10::CachingAllocator::StatArray& stat, size_t amount) { stat[0].decrease(amount); }

void hand_back(void* context);

struct Devices final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    check_process();
    const c10::DeviceIndex index = current_device();
    const c10::Device device(kSim, index);
    if (n == 0) return {nullptr, nullptr, &hand_back, device};
    const size_t size = (n + kRound - 1) / kRound * kRound;
    const c10::StreamId stream = current_stream(index).id();
    DeviceMemory& memory = memories[index];
    std::lock_guard<std::mutex> lock(memory.mutex);
    collect(memory);
    Block* block = reuse(memory, stream, size);
    if (block == nullptr) {
      const auto reserved = size_t(memory.stats.reserved_bytes[0].current);
      if (reserved + size > memory.capacity) release(index, memory);
      TORCH_CHECK_WITH(
          OutOfMemoryError, size_t(memory.stats.reserved_bytes[0].current) + size <= memory.capacity,
          "sim:", int(index), " out of memory. Tried to allocate ", n, " bytes of ", memory.capacity);
      block = new Block{system_memory(size), size, 0, 0, index, stream};
      grow(memory.stats.reserved_bytes, size);
      grow(memory.stats.segment, 1);
    }
    block->rounded = size;
    block->requested = n;
    grow(memory.stats.allocation, 1);
    grow(memory.stats.active, 1);
    grow(memory.stats.allocated_bytes, size);
    grow(memory.stats.active_bytes, size);
    grow(memory.stats.requested_bytes, n);
    return {block->data, block, &hand_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const c10::Stream stream = current_stream(current_device());
    enqueue(stream, Kind::kKernel, [=] { std::memcpy(to, from, bytes); });
  }

  void free(Block* block) {
    if (bad_fork()) return;  // this process has no streams and will not use the memory again
    DeviceMemory& memory = memories[block->device];
    std::lock_guard<std::mutex> lock(memory.mutex);
    shrink(memory.stats.allocation, 1);
    shrink(memory.stats.allocated_bytes, block->rounded);
    shrink(memory.stats.requested_bytes, block->requested);
    for (c10::StreamId other : block->others) {
      block->pending.push_back(mark(stream_of(block->device, other)));
    }
    block->others.clear();
    if (block->pending.empty()) {
      recycle(memory, block);
    } else {
      memory.pending.push_back(block);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &hand_back || data.get_context() == nullptr) return;
    auto* block = static_cast<Block*>(data.get_context());
    if (stream.device_index() == block->device && stream.id() == block->stream) return;
    TORCH_CHECK(
        stream.device_index() == block->device, "record_stream: memory of sim:", int(block->device),
        " and ", stream);
    std::lock_guard<std::mutex> lock(memories[block->device].mutex);
    block->others.insert(stream.id());
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      std::lock_guard<std::mutex> lock(memories[index].mutex);
      release(index, memories[index]);
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    DeviceMemory& memory = memories.at(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    collect(memory);
    return memory.stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each(index, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    each(index, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  // (free, total); an override since torch 2.10.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    DeviceMemory& memory = memories.at(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    const auto reserved = size_t(memory.stats.reserved_bytes[0].current);
    return {memory.capacity - std::min(reserved, memory.capacity), memory.capacity};
  }

  std::array<DeviceMemory, kDevices> memories;

 private:
  template <typename F>
  void each(c10::DeviceIndex index, F apply) {
    DeviceMemory& memory = memories.at(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    DeviceStats& s = memory.stats;
    for (auto* stat : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
                       &s.active_bytes, &s.requested_bytes}) {
      apply((*stat)[0]);
    }
  }

  Block* reuse(DeviceMemory& memory, c10::StreamId stream, size_t size) {
    auto& blocks = memory.free[stream];
    auto found = blocks.lower_bound(size);
    if (found == blocks.end() || found->first > 2 * size) return nullptr;
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }

  // To the free blocks of its stream, overwritten by what comes next there.
  void recycle(DeviceMemory& memory, Block* block) {
    shrink(memory.stats.active, 1);
    shrink(memory.stats.active_bytes, block->rounded);
    enqueue(
        stream_of(block->device, block->stream), Kind::kHousekeeping,
        [data = block->data, size = block->size] { std::memset(data, kNaN, size); });
    auto& blocks = memory.free[block->stream];
    blocks.emplace_hint(blocks.lower_bound(block->size), block->size, block);  // the first to go
  }

  void collect(DeviceMemory& memory) {
    for (auto it = memory.pending.begin(); it != memory.pending.end();) {
      Block* block = *it;
      if (!all_reached(block->pending)) {
        ++it;
        continue;
      }
      block->pending.clear();
      recycle(memory, block);
      it = memory.pending.erase(it);
    }
  }

  // Back to the system. Like cudaFree it waits for the device.
  void release(c10::DeviceIndex index, DeviceMemory& memory) {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      const c10::Stream stream = stream_of(index, id);
      if (!idle(stream)) mark(stream)->wait();
    }
    collect(memory);
    for (auto& [id, blocks] : memory.free) {
      if (!blocks.empty()) mark(stream_of(index, id))->wait();
      for (auto& [size, block] : blocks) {
        shrink(memory.stats.reserved_bytes, size);
        shrink(memory.stats.segment, 1);
        std::free(block->data);
        delete block;
      }
      blocks.clear();
    }
  }
};

Devices& devices() {
  static auto* instance = new Devices();
  return *instance;
}

void hand_back(void* context) {
  if (context != nullptr) devices().free(static_cast<Block*>(context));
}

struct PinnedBlock {
  void* data;
  size_t size;
  std::vector<Place> pending = {};
};

void hand_back_pinned(void* context);

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = dropped.begin(); it != dropped.end();) {
      if (all_reached((*it)->pending)) {
        std::free((*it)->data);
        delete *it;
        it = dropped.erase(it);
      } else {
        ++it;
      }
    }
    if (n == 0) return {nullptr, nullptr, &hand_back_pinned, c10::DeviceType::CPU};
    auto* block = new PinnedBlock{system_memory(n), n};
    live[block->data] = block;
    return {block->data, block, &hand_back_pinned, c10::DeviceType::CPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void free(PinnedBlock* block) {
    std::lock_guard<std::mutex> lock(mutex);
    live.erase(block->data);
    dropped.push_back(block);
  }

  PinnedBlock* find(const void* data) {
    auto after = live.upper_bound(const_cast<void*>(data));
    if (after == live.begin()) return nullptr;
    PinnedBlock* block = std::prev(after)->second;
    return static_cast<const char*>(data) < static_cast<char*>(block->data) + block->size ? block
                                                                                       : nullptr;
  }

  std::mutex mutex;
  std::map<void*, PinnedBlock*> live;
  std::list<PinnedBlock*> dropped;
};

Pinned& pinned_memory() {
  static auto* instance = new Pinned();
  return *instance;
}

void hand_back_pinned(void* context) {
  if (context != nullptr) pinned_memory().free(static_cast<PinnedBlock*>(context));
}

const bool registered = [] {
  c10::SetAllocator(kSim, &devices());
  return true;
}();

}  // namespace

bool pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_memory().mutex);
  return pinned_memory().find(data) != nullptr;
}

void record_pinned(const void* data, c10::Stream stream) {
  Place place = mark(stream);
  std::lock_guard<std::mutex> lock(pinned_memory().mutex);
  if (PinnedBlock* block = pinned_memory().find(data)) block->pending.push_back(std::move(place));
}

c10::Allocator* pinned_allocator() { return &pinned_memory(); }

c10::Allocator* device_allocator() { return &devices(); }

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  devices().recordStream(data, stream);
}

void set_capacity(c10::DeviceIndex device, int64_t bytes) {
  DeviceMemory& memory = devices().memories.at(device);
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.capacity = bytes;
}

int64_t free_memory(c10::DeviceIndex device) {
  return int64_t(devices().getMemoryInfo(device).first);
}

}  // namespace sim
