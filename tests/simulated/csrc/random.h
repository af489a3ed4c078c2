// One generator for each device. Like CUDA's Philox it is a seed and an offset: a kernel takes its
// numbers when it is launched, whenever it runs.
#pragma once

#include <ATen/core/Generator.h>

#include "stream.h"

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The seed of one kernel; advances the generator (the device's own one without an argument).
uint64_t draw(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace sim
