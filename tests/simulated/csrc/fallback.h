// How an operator runs on a simulated device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "stream.h"

namespace sim {

// Runs `op` on the device of its arguments: its CPU kernel, on the current stream. The operator
// that the arguments were meant for names it in errors.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The CPU's view of a tensor's memory. It keeps nothing alive: what a stream reads has to be kept
// from being reused by the allocator's rules, as on a GPU.
at::Tensor on_cpu(const at::Tensor& tensor);

// Changes the size of a storage, in stream order.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace sim
