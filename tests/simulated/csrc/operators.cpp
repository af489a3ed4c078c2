// Every operator by one boxed kernel: its CPU kernel, on the memory of the device. Others are not
// computation (new tensors, views, copies), or PyTorch routes them another way on devices that it
// does not know.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <cstring>

#include "machine.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Kernels below us must not come back to autograd, autocast or modes in Python.
struct BelowAutograd {
  c10::AutoGradMode no_grad{false};
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard rest{
      c10::autocast_dispatch_keyset | c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::Functionalize)};
};

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// Applies `to` to each tensor of an argument.
template <typename F>
IValue map_tensors(const IValue& value, const F& to) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(to(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(to(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor.has_value() && tensor->defined() ? std::optional(to(*tensor)) : tensor);
    }
    return mapped;
  }
  return value;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  std::vector<at::Tensor> tensors;
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

void use_of(const at::Tensor& tensor, c10::Stream stream, bool write, const char* kernel) {
  const size_t bytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), 0);
  use(tensor.const_data_ptr(), bytes, stream, write, kernel);
}

// The CPU's view of a tensor's memory; what is the host's own is left as it is.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::from_blob(
      tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

// Changes the size of a storage.
void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard on_device(storage.device());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  if (storage.nbytes() > 0) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

// Gives a tensor sizes and strides, and its storage as many bytes as these need.
void reshape(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t bytes = at::detail::computeStorageNbytes(
      sizes, strides, tensor.element_size(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// ---- Computation ------------------------------------------------------------------------------

// An `out=`: kernels get an empty tensor in its place, which they may resize.
bool is_returned_out(const c10::OperatorHandle& op, const c10::Argument& argument) {
  return argument.is_out() && !op.schema().returns().empty();
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// Whether what it returns, or its shape, depends on data.
bool needs_data(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  for (const IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;  // indices
    for (const at::Tensor& tensor : tensors_of(value)) {
      if (is_mask(tensor)) return true;
    }
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

c10::Device device_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    for (const at::Tensor& tensor : tensors_of(value)) {
      const bool may = value.isOptionalTensorList() || tensor.dim() == 0;  // indices, numbers
      if (tensor.device().is_cpu() && may) continue;
      TORCH_CHECK(
          is_ours(tensor) && (!device || *device == tensor.device()),
          "Expected all tensors to be on the same device, but found at least two devices, ",
          device ? *device : c10::Device(kSim), " and ", tensor.device(), "! (in ",
          op.operator_name(), ")");
      device = tensor.device();
    }
  }
  for (const IValue& value : arguments) {
    if (!device && value.isDevice() && value.toDevice().type() == kSim) device = value.toDevice();
  }
  TORCH_CHECK(device, op.operator_name(), " was called on sim without anything on sim");
  return device->has_index() ? *device : c10::Device(kSim, current_device());
}

// A generator for the CPU kernel, from one number of the device's (or of the one that is given).
at::Generator drawn_from(const IValue& given, c10::DeviceIndex device) {
  at::Generator generator =
      given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator({kSim, device});
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::detail::createCPUGenerator(generator.get<at::CPUGeneratorImpl>()->random64());
}

// Which argument a return is, -1 if it is new. Views are not for this kernel: they have their own.
int64_t returned_argument(const c10::OperatorHandle& op, size_t k) {
  const auto& schema = op.schema();
  const auto* alias = schema.returns()[k].alias_info();
  if (alias == nullptr) return -1;
  TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), op.operator_name(), ": a view unknown to sim");
  for (size_t a = 0; a < schema.arguments().size(); ++a) {
    const auto* other = schema.arguments()[a].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return int64_t(a);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), ": what it returns is unknown to sim");
}

// Runs `op` on the device of its arguments.
void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& formal = op.schema().arguments();
  const char* name = op.schema().name().c_str();
  const auto arguments = torch::jit::last(*stack, formal.size()).vec();
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard on_device(device);
  const BelowAutograd guard;
  const c10::Stream stream = current_stream(device.index());
  if (needs_data(op, arguments)) implicit_wait(stream, op.schema().name());
  launch(stream);
  Stack given;
  bool draws = false;
  for (size_t k = 0; k < formal.size(); ++k) {
    const IValue& value = arguments[k];
    if (formal[k].name() == "generator") {
      draws = true;
      given.emplace_back(drawn_from(value, device.index()));
    } else if (value.isDevice()) {
      given.emplace_back(c10::Device(at::kCPU));
    } else if (is_returned_out(op, formal[k])) {
      given.push_back(map_tensors(value, [](const at::Tensor& out) {
        return at::empty({0}, out.options().device(at::kCPU));
      }));
    } else {
      const bool writes = formal[k].alias_info() != nullptr && formal[k].alias_info()->isWrite();
      for (const at::Tensor& tensor : tensors_of(value)) use_of(tensor, stream, writes, name);
      given.push_back(map_tensors(value, on_cpu));
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      draws || !op.hasTag(at::Tag::nondeterministic_seeded), op.operator_name(),
      " draws random numbers, and not from a generator that one can give it: unknown to sim");
  Stack made = given;
  op.callBoxed(&made);
  const auto store = [&](const at::Tensor& computed, const at::Tensor& there) {
    use_of(there, stream, true, name);
    on_cpu(there).copy_(computed);
  };
  for (size_t k = 0; k < formal.size(); ++k) {
    if (!is_returned_out(op, formal[k])) continue;
    const auto ours = tensors_of(arguments[k]), theirs = tensors_of(given[k]);
    for (size_t t = 0; t < ours.size(); ++t) {
      if (ours[t].sizes() != theirs[t].sizes()) reshape(ours[t], theirs[t].sizes(), theirs[t].strides());
      store(theirs[t], ours[t]);
    }
  }
  torch::jit::drop(*stack, formal.size());
  for (size_t k = 0; k < made.size(); ++k) {
    const bool holds_tensors = made[k].isTensor() || made[k].isTensorList();
    const int64_t argument = holds_tensors ? returned_argument(op, k) : -1;
    stack->push_back(argument >= 0 ? arguments[argument] : map_tensors(made[k], [&](const at::Tensor& computed) {
      at::Tensor ours = at::detail::empty_strided_generic(
          computed.sizes(), computed.strides(), device_allocator(),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), computed.scalar_type());
      store(computed, ours);
      return ours;
    }));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = operator_named("aten::convolution");
  run(op, stack);
}

// convolution_backward takes the sizes of the bias after the weight.
void convolution_backward(const c10::OperatorHandle& overrideable, Stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  const auto& gradient = torch::jit::last(*stack, overrideable.schema().arguments().size())[0];
  const std::vector<int64_t> channels{gradient.toTensor().size(1)};
  stack->insert(stack->end() - overrideable.schema().arguments().size() + 3, channels);
  run(op, stack);
}

// Its CPU kernel draws from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;  // the math path
}

// ---- Tensors and views ------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const at::Tensor wanted = at::empty(size, self.options().device(at::kMeta), format);
  reshape(self, size, wanted.strides());
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  const at::Tensor wanted = at::empty(size, self.options().device(at::kMeta));
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape(self, size, stride.empty() ? wanted.strides() : stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes()) / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {});
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// ---- Copies, by CUDA's rules ------------------------------------------------------------------

// Between devices: the current stream of the source's device copies, after the current stream of
// the destination's has come to this point, and that one goes on when the copy is done. To and from
// pinned memory with non_blocking: the stream copies, later. From pageable memory with
// non_blocking: the host's data are put aside first. All other copies make the host wait.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const BelowAutograd guard;
  const at::Tensor from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
  const bool ours = is_ours(from);
  const at::Tensor& host = ours ? to : from;
  TORCH_CHECK_NOT_IMPLEMENTED(
      host.is_cpu() || is_ours(host), "copy from ", from.device(), " to ", to.device());
  const c10::Stream stream = current_stream((ours ? from : to).device().index());
  const bool two = ours && is_ours(to) && from.device() != to.device();
  const c10::Stream target = two ? current_stream(to.device().index()) : stream;
  // Copies on the host would convert or rearrange on the way.
  const bool later = non_blocking && from.scalar_type() == to.scalar_type() &&
      from.is_contiguous() && to.is_contiguous() && host.is_cpu() && pinned(host.const_data_ptr());
  if (two) wait(stream, mark(target));
  launch(stream, 1e-3 + double(to.nbytes()) / 1e7);  // 10 GB/s
  use_of(from, stream, false, "a copy");
  use_of(to, stream, true, "a copy");
  if (later && !ours) arrive_now(from.const_data_ptr());
  on_cpu(to).copy_(on_cpu(from));
  if (later && ours) arrive_later(to.mutable_data_ptr(), to.nbytes(), stream);
  if (two) wait(target, mark(stream));
  if (host.is_cpu() && (ours ? !later : !non_blocking)) {
    implicit_wait(stream, ours ? "copy to the host" : "copy from the host");
  }
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("record_stream", &record_stream_of);
  m.impl("_copy_from", &copy_from);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_sdp_choice", &plain_attention);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace sim
