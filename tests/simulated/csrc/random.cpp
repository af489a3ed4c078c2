#include "random.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <vector>

namespace sim {
namespace {

// The finalizer of SplitMix64, a bijection.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_.offset = offset; }
  uint64_t get_offset() const override { return state_.offset; }
  uint64_t current_seed() const override { return state_.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.numel() == sizeof(State), "RNG state is wrong size");
    std::memcpy(&state_, bytes.data(), sizeof(State));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor bytes = at::empty({int64_t(sizeof(State))}, at::device(at::kCPU).dtype(at::kByte));
    std::memcpy(bytes.mutable_data_ptr(), &state_, sizeof(State));
    return bytes.getIntrusivePtr();
  }

  uint64_t next() {
    const uint64_t seed = mix(state_.seed ^ mix(state_.offset));
    state_.offset += 4;
    return seed;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state_ = state_;
    return copy;
  }

  State state_;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* generators = new std::vector<at::Generator>();
    for (c10::DeviceIndex d = 0; d < kDevices; ++d) generators->push_back(new_generator(d));
    return generators;
  }();
  return made->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

uint64_t draw(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  at::Generator generator = given.has_value() ? *given : default_generator(device);
  TORCH_CHECK(
      generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
      generator.device().type(), "'");
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace sim
