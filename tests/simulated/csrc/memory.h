// Memory of the simulated devices and pinned memory of the host.
#pragma once

#include <c10/core/Allocator.h>

#include "stream.h"

namespace sim {

// Pinned memory: the copy that `stream` was just given uses it, so it must not be reused before.
bool pinned(const void* data);
void record_pinned(const void* data, c10::Stream stream);
c10::Allocator* pinned_allocator();

c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void set_capacity(c10::DeviceIndex device, int64_t bytes);
int64_t free_memory(c10::DeviceIndex device);

}  // namespace sim
