// Autocast: PyTorch's own lists of operators, each by a boxed kernel that casts its arguments.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "stream.h"

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastPrivateUse1};
};

IValue cast(at::ScalarType dtype, const IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? at::autocast::cached_cast(dtype, value.toTensor(), kSim) : value;
  }
  if (value.isTensorList()) {
    return at::autocast::cached_cast(dtype, at::TensorList(value.toTensorVector()), kSim);
  }
  return value;
}

void call_in(at::ScalarType dtype, const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  const size_t count = op.schema().arguments().size();
  for (size_t k = stack->size() - count; k < stack->size(); ++k) (*stack)[k] = cast(dtype, (*stack)[k]);
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_in(at::autocast::get_autocast_dtype(kSim), op, stack);
}

void full_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_in(at::kFloat, op, stack);
}

// Reductions with a dtype argument: float32 unless the caller has chosen.
void full_precision_dtype(const c10::OperatorHandle& op, Stack* stack) {
  NoAutocast guard;
  const auto& formal = op.schema().arguments();
  const size_t first = stack->size() - formal.size();
  const IValue& tensor = (*stack)[first];
  if (tensor.isTensor() && at::autocast::is_eligible(tensor.toTensor(), kSim)) {
    for (size_t k = 0; k < formal.size(); ++k) {
      IValue& value = (*stack)[first + k];
      if (formal[k].name() == "dtype" && value.isNone()) value = int64_t(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

void widest(const c10::OperatorHandle& op, Stack* stack) {
  at::ScalarType dtype = at::autocast::get_autocast_dtype(kSim);
  const size_t count = op.schema().arguments().size();
  for (const IValue& value : torch::jit::last(*stack, count)) {
    if (value.isTensor() && value.toTensor().defined()) {
      dtype = at::autocast::prioritize(dtype, value.toTensor(), kSim);
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        dtype = at::autocast::prioritize(dtype, tensor, kSim);
      }
    }
  }
  call_in(dtype, op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define SIM_NAME_1(op) #op
#define SIM_NAME_2(op, overload) #op "." #overload
#define SIM_PICK(_1, _2, name, ...) name
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME_2, SIM_NAME_1)(__VA_ARGS__)
#define SIM_LOWER(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
#define SIM_FULL(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&full_precision>());
#define SIM_FULL_DTYPE(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&full_precision_dtype>());
#define SIM_WIDEST(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&widest>());

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FULL_DTYPE)
  AT_FORALL_PROMOTE(SIM_WIDEST)
  SIM_WIDEST(cat)
  SIM_WIDEST(stack)
}

}  // namespace
}  // namespace sim
