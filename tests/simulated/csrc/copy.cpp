// Copies, by CUDA's rules.
//
// Between devices: the current stream of the source's device copies, after the current stream of
// the destination's has come to this point, and that one goes on when the copy is done.
// To and from pinned memory with non_blocking: the stream copies, later. From pageable memory with
// non_blocking: the host's data are put aside first. All other copies make the host wait.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "fallback.h"
#include "memory.h"

namespace sim {
namespace {

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// What copies on the host would convert or rearrange on the way.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous();
}

// `from` and `to` as the CPU sees them; they keep alive only what is the host's.
void enqueue_copy(c10::Stream stream, at::Tensor from, at::Tensor to) {
  enqueue(stream, Kind::kKernel, [from, to]() mutable {
    c10::AutoGradMode no_grad(false);
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
}

// The CPU's view of a host tensor's memory, which the copy does not keep alive, either.
at::Tensor alias(const at::Tensor& tensor) { return tensor.detach(); }

void between_devices(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream source = current_stream(from.device().index());
  const c10::Stream target = current_stream(to.device().index());
  const bool two = from.device() != to.device();
  if (two) wait_on_stream(source, mark(target));
  enqueue_copy(source, on_cpu(from), on_cpu(to));
  if (two) wait_on_stream(target, mark(source));
}

void from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(to.device().index());
  const bool later = non_blocking && same_layout(from, to) && pinned(from.const_data_ptr());
  enqueue_copy(stream, later ? alias(from) : from.clone(), on_cpu(to));
  if (later) record_pinned(from.const_data_ptr(), stream);
  if (!non_blocking) implicit_wait(stream, "copy from the host");
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(from.device().index());
  const bool later = non_blocking && same_layout(from, to) && pinned(to.const_data_ptr());
  enqueue_copy(stream, on_cpu(from), alias(to));
  if (later) {
    record_pinned(to.const_data_ptr(), stream);
  } else {
    implicit_wait(stream, "copy to the host");
  }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  c10::AutoGradMode no_grad(false);
  at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
  if (is_ours(from) && is_ours(to)) {
    between_devices(from, to);
  } else if (is_ours(to)) {
    TORCH_CHECK_NOT_IMPLEMENTED(from.is_cpu(), "copy from ", from.device(), " to ", to.device());
    from_host(from, to, non_blocking);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(to.is_cpu(), "copy from ", from.device(), " to ", to.device());
    to_host(from, to, non_blocking);
  }
  return to;
}

c10::Scalar local_scalar(const at::Tensor& self) {
  implicit_wait(current_stream(self.device().index()), "item");
  return on_cpu(self).item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
}

}  // namespace
}  // namespace sim
