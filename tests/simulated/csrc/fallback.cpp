// Every operator by one boxed kernel. What it returns is made at once, with the shapes that the
// operator has on meta tensors; the operator's CPU kernel runs later, on the current stream.
//
//   host      x.mm(y) -> [shapes by meta] -> [empty output] -> [enqueue] -> return
//   stream                                                       ... CPU kernel, copy to output
//
// Where there is no meta kernel, or the shapes depend on data, the host waits for the stream.
#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <utility>

#include "memory.h"
#include "random.h"

namespace at::detail {
TORCH_API Generator createCPUGenerator(uint64_t seed);  // not in a header of its own
}

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Kernels below us must not come back to autograd, autocast or modes in Python.
struct BelowAutograd {
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

template <typename F>
void each_tensor(const IValue& value, const F& visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// ---- What the meta kernel says --------------------------------------------------------------

struct Geometry {
  bool defined = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes = {}, strides = {};
};

Geometry geometry_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

struct Plan {
  bool known = false;  // false: look at the data
  std::vector<std::vector<Geometry>> returns;  // of what is new, for each return
  std::vector<char> is_list;
  std::vector<std::vector<Geometry>> mutated;  // for each argument that is written to
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// An `out=`: what it holds before does not count, so kernels get an empty tensor in its place.
// Some of them use it as scratch memory on the way.
bool is_returned_out(const c10::OperatorHandle& op, const c10::Argument& argument) {
  return argument.is_out() && !op.schema().returns().empty();
}

IValue fresh(const IValue& outs, c10::Device device) {
  return map_tensors(outs, [device](const at::Tensor& out) {
    return at::empty({0}, out.options().device(device));
  });
}

// Operators whose meta kernel promises other shapes than their CPU kernel computes.
bool meta_is_wrong(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only";
}

// Everything on which the shapes can depend; empty if something else is among the arguments.
std::string key_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::string key;
  const auto put = [&key](const auto& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto put_tensor = [&](const at::Tensor& tensor) {
    put(char(tensor.scalar_type()));
    put(char(tensor.device().type()));
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    put(tensor.dim());
    for (int64_t size : tensor.sizes()) put(size);
    for (int64_t stride : tensor.strides()) put(stride);
  };
  put(&op.operator_name().name[0]);
  put(c10::get_default_dtype_as_scalartype());
  for (const IValue& value : arguments) {
    key += char('A' + value.isTensor() + 2 * value.isList());
    if (value.isNone()) {
      key += 'n';
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) put_tensor(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& element : value.toListRef()) {
        key += element.isTensor() && element.toTensor().defined() ? 't' : 'u';
        if (key.back() == 't') put_tensor(element.toTensor());
      }
      key += '.';
    } else if (value.isInt()) {
      key += 'i';
      put(value.toInt());
    } else if (value.isDouble()) {
      key += 'd';
      put(value.toDouble());
    } else if (value.isBool()) {
      key += value.toBool() ? 'y' : 'f';
    } else if (value.isIntList()) {
      for (int64_t number : value.toIntVector()) put(number);
      key += '.';
    } else if (value.isBoolList()) {
      for (bool flag : value.toBoolList()) key += flag ? 'y' : 'f';
      key += '.';
    } else if (value.isString()) {
      key += value.toStringRef() + '.';
    } else if (!value.isDevice() && !value.isGenerator()) {
      return {};
    }
  }
  return key;
}

Plan ask_meta(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
  const auto to_meta = [&](const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    at::Tensor& meta = made[tensor.unsafeGetTensorImpl()];
    if (!meta.defined()) {
      meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }
    return meta;
  };
  Stack stack;
  const auto& formal = op.schema().arguments();
  for (size_t k = 0; k < arguments.size(); ++k) {
    const IValue& value = arguments[k];
    if (value.isDevice()) {
      stack.emplace_back(c10::Device(at::kMeta));
    } else if (value.isGenerator()) {
      stack.emplace_back();
    } else if (is_returned_out(op, formal[k])) {
      stack.push_back(fresh(value, at::kMeta));
    } else {
      stack.push_back(map_tensors(value, to_meta));
    }
  }
  const std::vector<IValue> given = stack;
  Plan plan;
  if (meta_is_wrong(op)) return plan;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return plan;  // no meta kernel, data needed, or a mistake that the CPU kernel will name
  }
  const auto list_of = [](const IValue& value) {
    std::vector<Geometry> geometries;
    if (value.isTensor()) geometries.push_back(geometry_of(value.toTensor()));
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) geometries.push_back(geometry_of(tensor));
    }
    return geometries;
  };
  plan.known = true;
  for (const IValue& value : stack) {
    plan.known = plan.known && (value.isTensor() || value.isTensorList());
    plan.returns.push_back(list_of(value));
    plan.is_list.push_back(value.isTensorList());
  }
  for (size_t k = 0; k < given.size(); ++k) {
    if (writes(formal[k])) plan.mutated.push_back(list_of(given[k]));
  }
  return plan;
}

std::shared_ptr<const Plan> plan_for(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  static auto* mutex = new std::mutex();
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<const Plan>>();
  const std::string key = key_of(op, arguments);
  if (!key.empty()) {
    std::lock_guard<std::mutex> lock(*mutex);
    auto found = known->find(key);
    if (found != known->end()) return found->second;
  }
  // Without the lock: many of these kernels are Python, and need the interpreter's.
  auto plan = std::make_shared<const Plan>(ask_meta(op, arguments));
  if (!key.empty()) {
    std::lock_guard<std::mutex> lock(*mutex);
    known->emplace(key, plan);
  }
  return plan;
}

// ---- Arguments --------------------------------------------------------------------------------

// Operators that take indices and lengths from the host, too.
bool takes_host_tensors(const std::string& name) {
  for (const char* known : {"aten::index", "aten::_unsafe_index", "aten::_index_put_impl_",
                            "aten::index_put", "aten::_unsafe_index_put", "aten::index_put_",
                            "aten::_pack_padded_sequence"}) {
    if (name == known) return true;
  }
  return false;
}

c10::Device device_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!is_ours(tensor)) {
        TORCH_CHECK(
            tensor.device().is_cpu() &&
                (tensor.dim() == 0 || takes_host_tensors(op.operator_name().name)),
            "Expected all tensors to be on the same device, but found at least two devices, sim and ",
            tensor.device(), "! (in ", op.operator_name(), ")");
        return;
      }
      TORCH_CHECK(
          !device || *device == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *device,
          " and ", tensor.device(), "! (in ", op.operator_name(), ")");
      device = tensor.device();
    });
  }
  for (const IValue& value : arguments) {
    if (!device && value.isDevice() && value.toDevice().type() == kSim) device = value.toDevice();
  }
  TORCH_CHECK(device, op.operator_name(), " was called on sim without anything on sim");
  return device->has_index() ? *device : c10::Device(kSim, current_device());
}

at::Tensor empty_like(const Geometry& geometry) {
  if (!geometry.defined) return {};
  return at::detail::empty_strided_generic(
      geometry.sizes, geometry.strides, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), geometry.dtype);
}

// The arguments for the CPU kernel. What is the host's is copied now: later it may be another.
Stack cpu_arguments(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, c10::DeviceIndex device) {
  Stack stack;
  bool draws = false;
  const auto& formal = op.schema().arguments();
  for (size_t k = 0; k < arguments.size(); ++k) {
    const IValue& value = arguments[k];
    if (formal[k].name() == "generator") {
      draws = true;
      std::optional<at::Generator> given;
      if (value.isGenerator()) given = value.toGenerator();
      stack.emplace_back(at::detail::createCPUGenerator(draw(given, device)));
    } else if (value.isDevice()) {
      stack.emplace_back(c10::Device(at::kCPU));
    } else if (is_returned_out(op, formal[k])) {
      stack.push_back(fresh(value, at::kCPU));
    } else {
      stack.push_back(map_tensors(value, on_cpu));
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      draws || !op.hasTag(at::Tag::nondeterministic_seeded), op.operator_name(),
      " draws random numbers, and not from a generator that one can give it: unknown to sim");
  return stack;
}

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  c10::AutoGradMode no_grad(false);
  BelowAutograd guard;
  op.callBoxed(&stack);
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

// An `out` that the operator has resized.
void reshape(const at::Tensor& tensor, const Geometry& wanted) {
  if (!wanted.defined || tensor.sizes() == at::IntArrayRef(wanted.sizes)) return;
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t bytes = at::detail::computeStorageNbytes(
      wanted.sizes, wanted.strides, tensor.element_size(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  impl->set_sizes_and_strides(wanted.sizes, wanted.strides);
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  std::vector<at::Tensor> tensors;
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTensorList()) tensors = value.toTensorVector();
  return tensors;
}

// What a kernel computed, to where the host expects it.
void deliver(const c10::OperatorHandle& op, const at::Tensor& computed, const at::Tensor& promised) {
  if (!computed.defined() || !promised.defined()) return;
  if (computed.numel() == 0) return;  // nothing to save here, as in batch_norm for evaluation
  TORCH_CHECK(
      computed.sizes() == promised.sizes(), op.operator_name(), " computed a tensor of shape ",
      computed.sizes(), " where meta promised ", promised.sizes());
  promised.copy_(computed);
}

// Enqueues the operator; the returns are new tensors, or arguments.
std::vector<IValue> run_later(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const Plan& plan,
    c10::Stream stream) {
  const auto& formal = op.schema().arguments();
  size_t m = 0;
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (!writes(formal[k])) continue;
    const auto tensors = tensors_of(arguments[k]);
    const auto& wanted = plan.mutated[m++];
    for (size_t t = 0; t < tensors.size(); ++t) reshape(tensors[t], wanted[t]);
  }
  Stack stack = cpu_arguments(op, arguments, stream.device_index());
  std::vector<IValue> returns;
  std::vector<std::vector<at::Tensor>> outputs;  // the CPU's views of what is to be delivered
  for (size_t k = 0; k < plan.returns.size(); ++k) {
    const int64_t argument = returned_argument(op, k);
    if (argument >= 0) {
      returns.push_back(arguments[argument]);
    } else {
      std::vector<at::Tensor> made;
      for (const Geometry& geometry : plan.returns[k]) made.push_back(empty_like(geometry));
      returns.push_back(plan.is_list[k] ? IValue(made) : IValue(made[0]));
    }
    outputs.emplace_back();
    if (argument >= 0 && !is_returned_out(op, formal[argument])) continue;
    for (const at::Tensor& tensor : tensors_of(returns.back())) {
      outputs.back().push_back(tensor.defined() ? on_cpu(tensor) : tensor);
    }
  }
  enqueue(stream, Kind::kKernel, [op, stack, outputs]() mutable {
    call_on_cpu(op, stack);
    c10::AutoGradMode no_grad(false);
    BelowAutograd guard;
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (outputs[k].empty()) continue;
      const auto computed = tensors_of(stack[k]);
      for (size_t t = 0; t < outputs[k].size(); ++t) deliver(op, computed.at(t), outputs[k][t]);
    }
  });
  return returns;
}

// Waits for the stream and runs the operator on the host.
std::vector<IValue> run_now(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, c10::Stream stream) {
  implicit_wait(stream, toString(op.operator_name()));
  Stack stack = cpu_arguments(op, arguments, stream.device_index());
  const Stack given = stack;
  call_on_cpu(op, stack);
  const auto& formal = op.schema().arguments();
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (!is_returned_out(op, formal[k])) continue;
    const auto ours = tensors_of(arguments[k]), theirs = tensors_of(given[k]);
    for (size_t t = 0; t < ours.size(); ++t) {
      reshape(ours[t], geometry_of(theirs[t]));
      on_cpu(ours[t]).copy_(theirs[t]);
    }
  }
  std::vector<IValue> returns;
  for (size_t k = 0; k < stack.size(); ++k) {
    const bool holds_tensors = stack[k].isTensor() || stack[k].isTensorList();
    const int64_t argument = holds_tensors ? returned_argument(op, k) : -1;
    if (argument >= 0) {
      returns.push_back(arguments[argument]);
      continue;
    }
    returns.push_back(map_tensors(stack[k], [](const at::Tensor& computed) {
      at::Tensor ours = empty_like(geometry_of(computed));
      if (ours.defined()) on_cpu(ours).copy_(computed);
      return ours;
    }));
  }
  return returns;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  c10::AutoGradMode no_grad(false);
  BelowAutograd guard;
  at::Tensor view;
  if (is_ours(tensor)) {
    view = at::from_blob(
        tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
        at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  } else {
    view = tensor.clone();
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return view;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count).vec();
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard on_device(device);
  c10::AutoGradMode no_grad(false);
  BelowAutograd guard;
  const c10::Stream stream = current_stream(device.index());
  const auto plan = plan_for(op, arguments);
  auto returns = plan->known ? run_later(op, arguments, *plan, stream) : run_now(op, arguments, stream);
  torch::jit::drop(*stack, count);
  for (IValue& value : returns) stack->push_back(std::move(value));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard on_device(storage.device());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  enqueue(
      current_stream(storage.device().index()), Kind::kKernel,
      [to = data.get(), from = storage.data(), n = std::min(bytes, storage.nbytes())] {
        if (n > 0) std::memcpy(to, from, n);
      });
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace sim
