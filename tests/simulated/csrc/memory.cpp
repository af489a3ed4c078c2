// As CUDA's caching allocator does it: a block belongs to the stream on which it was allocated.
// Handed back, it could be handed out again on that stream at once, whatever other streams still do
// with it, unless they were recorded. Then it has to wait for the places at which these streams
// were when it was handed back; here until the host knows that they are past them, so that a
// program that leaves memory to be freed so needs as much as it ever may. Whoever allocates next on
// the stream is taken to get all that could be handed out; what he gets is new.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512;
constexpr int kNaN = 0xFF;  // in every floating point type, and -1 in integers
constexpr c10::DeviceIndex kHost = -1;

struct Use {
  size_t stream;
  uint64_t time;
  const char *begin, *end;
  bool write;
  const char* kernel;
};

struct Block {
  char* data;
  size_t size;
  size_t requested;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::vector<Use> uses = {};
  std::set<c10::StreamId> recorded = {};
  Mark pending = {};  // what these had waited for when it was handed back
};

// A copy to the host's memory that the host has not waited for.
struct Arrival {
  char* to;
  std::string bytes;
  size_t stream;
  uint64_t time;
};

std::map<const char*, Block*>& live() {  // by address
  static auto* blocks = new std::map<const char*, Block*>();
  return *blocks;
}

std::list<Arrival>& arrivals() {
  static auto* list = new std::list<Arrival>();
  return *list;
}

Block* block_at(const void* data) {
  auto after = live().upper_bound(static_cast<const char*>(data));
  if (after == live().begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return static_cast<const char*>(data) < block->data + block->size ? block : nullptr;
}

std::string told(const Block& block, const Use& use, c10::Stream stream) {
  const c10::Stream other = stream_of(use.stream / kStreams, use.stream % kStreams);
  return c10::str(" on ", stream, ", which has not waited for ", use.kernel, " on ", other, " (",
                  block.requested, " bytes of ", block.device == kHost ? "the host" : "a device", ")");
}

Block* made(size_t size, size_t requested, c10::DeviceIndex device, c10::StreamId stream) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host has no memory left");
  return new Block{static_cast<char*>(data), size, requested, device, stream};
}

c10::DataPtr handed_out(Block* block, c10::DeleterFnPtr hand_back, c10::Device device) {
  std::memset(block->data, kNaN, block->size);
  live()[block->data] = block;
  return {block->data, block, hand_back, device};
}

void hand_back(void* context);

struct DeviceMemory {
  std::map<c10::StreamId, std::vector<Block>> gone;  // as they were, for the next who allocates
  std::list<Block*> pending;
  DeviceStats stats;
  size_t capacity = size_t(4) << 30;
};

struct Devices final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const Lock lock = locked();
    const c10::DeviceIndex index = current_device();
    const c10::Device device(kSim, index);
    if (n == 0) return {nullptr, nullptr, &hand_back, device};
    const size_t size = (n + kRound - 1) / kRound * kRound;
    const c10::Stream stream = current_stream(index);
    DeviceMemory& memory = memories[index];
    launch(stream);
    check_reuse(memory, stream);
    if (free_bytes(memory) < size) release(index, memory);
    TORCH_CHECK_WITH(
        OutOfMemoryError, free_bytes(memory) >= size, "sim:", int(index),
        " out of memory. Tried to allocate ", n, " bytes of ", memory.capacity);
    memory.stats.active[0].increase(1);
    memory.stats.active_bytes[0].increase(size);
    memory.stats.allocated_bytes[0].increase(size);
    memory.stats.reserved_bytes[0].increase(size);
    return handed_out(made(size, n, index, stream.id()), &hand_back, device);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  void free(Block* block) {
    const Lock lock = locked();
    live().erase(block->data);
    DeviceMemory& memory = memories[block->device];
    memory.stats.allocated_bytes[0].decrease(block->size);
    for (c10::StreamId other : block->recorded) {
      join(block->pending.clock, clock_of(stream_of(block->device, other)));
    }
    memory.gone[block->stream].push_back(*block);
    memory.pending.push_back(block);
    collect(memory);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Lock lock = locked();
    Block* block = block_at(data.get());
    if (block == nullptr || block->device == kHost) return;
    TORCH_CHECK(
        stream.device_index() == block->device, "record_stream: memory of sim:", int(block->device),
        " and ", stream);
    if (stream.id() != block->stream) block->recorded.insert(stream.id());
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    const Lock lock = locked();
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) release(index, memories[index]);
  }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Lock lock = locked();
    collect(memories.at(index));
    return memories[index].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex index) override {
    const Lock lock = locked();
    DeviceStats& stats = memories.at(index).stats;
    for (auto* stat : {&stats.active, &stats.active_bytes, &stats.allocated_bytes}) {
      (*stat)[0].reset_peak();
    }
  }

  // (free, total); an override since torch 2.10.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    const Lock lock = locked();
    return {free_bytes(memories.at(index)), memories[index].capacity};
  }

  std::array<DeviceMemory, kDevices> memories;

 private:
  static size_t free_bytes(DeviceMemory& memory) {
    collect(memory);
    return memory.capacity - std::min(size_t(memory.stats.active_bytes[0].current), memory.capacity);
  }

  // Whether a stream may write into all that was allocated on it, and is gone.
  void check_reuse(DeviceMemory& memory, c10::Stream stream) {
    for (const Block& block : memory.gone[stream.id()]) {
      for (const Use& use : block.uses) {
        if (std::max(block.pending.clock[use.stream], clock_of(stream)[use.stream]) >= use.time) continue;
        report("memory may be reused too early" + told(block, use, stream));
      }
    }
    memory.gone[stream.id()].clear();
  }

  static void collect(DeviceMemory& memory) {
    memory.pending.remove_if([&memory](Block* block) {
      if (!reached(block->pending)) return false;
      memory.stats.active[0].decrease(1);
      memory.stats.active_bytes[0].decrease(block->size);
      memory.stats.reserved_bytes[0].decrease(block->size);
      std::free(block->data);
      delete block;
      return true;
    });
  }

  // Back to the system. Like cudaFree it waits for the device.
  static void release(c10::DeviceIndex index, DeviceMemory& memory) {
    synchronize_device(index);
    collect(memory);
    memory.gone.clear();
  }
};

Devices& devices() {
  static auto* instance = new Devices();
  return *instance;
}

void hand_back(void* context) {
  if (context != nullptr) devices().free(static_cast<Block*>(context));
}

void hand_back_pinned(void* context) {
  if (context == nullptr) return;
  const Lock lock = locked();
  auto* block = static_cast<Block*>(context);
  arrivals().remove_if([block](const Arrival& a) { return block_at(a.to) == block; });
  live().erase(block->data);
  std::free(block->data);
  delete block;
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const Lock lock = locked();
    if (n == 0) return {nullptr, nullptr, &hand_back_pinned, c10::DeviceType::CPU};
    return handed_out(made(n, n, kHost, 0), &hand_back_pinned, c10::DeviceType::CPU);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

const bool memory_registered = [] {
  c10::SetAllocator(kSim, &devices());
  return true;
}();

}  // namespace

c10::Allocator* device_allocator() { return &devices(); }

c10::Allocator* pinned_allocator() {
  static auto* instance = new Pinned();
  return instance;
}

bool pinned(const void* data) {
  const Lock lock = locked();
  const Block* block = block_at(data);
  return block != nullptr && block->device == kHost;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  devices().recordStream(data, stream);
}

void set_capacity(c10::DeviceIndex device, int64_t bytes) {
  const Lock lock = locked();
  devices().memories.at(device).capacity = bytes;
}

int64_t free_memory(c10::DeviceIndex device) {
  return int64_t(devices().getMemoryInfo(device).first);
}

void use(const void* data, size_t bytes, c10::Stream stream, bool write, const char* kernel) {
  const Lock lock = locked();
  Block* block = block_at(data);
  if (block == nullptr || bytes == 0) return;
  const auto* begin = static_cast<const char*>(data);
  const Use mine{number(stream), clock_of(stream)[number(stream)], begin, begin + bytes, write, kernel};
  bool known = false;
  for (Use& other : block->uses) {
    if (other.stream == mine.stream && other.begin == mine.begin && other.end == mine.end &&
        other.write == write) {
      other = mine;
      known = true;
      continue;
    }
    const bool meets = other.begin < mine.end && mine.begin < other.end;
    if (meets && (write || other.write) && clock_of(stream)[other.stream] < other.time) {
      report(c10::str("race: ", kernel, write ? " writes" : " reads", told(*block, other, stream)));
    }
  }
  if (!known) block->uses.push_back(mine);
}

void arrive_later(void* data, size_t bytes, c10::Stream stream) {
  const Lock lock = locked();
  auto* to = static_cast<char*>(data);
  arrivals().push_back({to, std::string(to, bytes), number(stream), clock_of(stream)[number(stream)]});
  std::memset(to, kNaN, bytes);
}

void arrive() {
  arrivals().remove_if([](const Arrival& arrival) {
    const bool is_here = known_to_host()[arrival.stream] >= arrival.time;
    if (is_here) std::memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size());
    return is_here;
  });
}

void arrive_now(const void* data) {
  const Lock lock = locked();
  Block* block = block_at(data);
  arrivals().remove_if([block](const Arrival& arrival) {
    const bool is_here = block_at(arrival.to) == block;
    if (is_here) std::memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size());
    return is_here;
  });
}

}  // namespace sim
