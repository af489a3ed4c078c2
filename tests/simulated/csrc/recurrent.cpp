// The cells of LSTM and GRU: PyTorch has fused kernels for them on all devices but the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <vector>

#include "stream.h"

namespace sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Bias = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Bias& bias) {
  return bias.has_value() && bias->defined() ? gates.add(*bias) : gates;
}

// Gradients of sigmoid and tanh, from their results.
Tensor through_sigmoid(const Tensor& grad, const Tensor& y) { return grad * y * (1 - y); }
Tensor through_tanh(const Tensor& grad, const Tensor& y) { return grad * (1 - y * y); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx, const Bias& input_bias,
    const Bias& hidden_bias) {
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat(Tensors{in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Bias& grad_hy, const Bias& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(4, 1);
  const Tensor &in = saved[0], &forget = saved[1], &cell = saved[2], &out = saved[3];
  const Tensor tanh = cy.tanh();
  Tensor grad = grad_cy.has_value() && grad_cy->defined() ? *grad_cy : cy * 0;
  Tensor grad_out = out * 0;
  if (grad_hy.has_value() && grad_hy->defined()) {
    grad = grad + through_tanh(*grad_hy * out, tanh);
    grad_out = through_sigmoid(*grad_hy * tanh, out);
  }
  const Tensor gates = at::cat(
      Tensors{
          through_sigmoid(grad * cell, in), through_sigmoid(grad * cx, forget),
          through_tanh(grad * in, cell), grad_out},
      1);
  return {gates, grad * forget, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx, const Bias& input_bias,
    const Bias& hidden_bias) {
  const auto i = with_bias(input, input_bias).chunk(3, 1);
  const auto h = with_bias(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid();
  const Tensor fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat(Tensors{reset, update, fresh, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3];
  const Tensor grad_fresh = through_tanh(grad * (1 - update), fresh);
  const Tensor grad_reset = through_sigmoid(grad_fresh * saved[4], reset);
  const Tensor grad_update = through_sigmoid(grad * (hx - fresh), update);
  const Tensor input = at::cat(Tensors{grad_reset, grad_update, grad_fresh}, 1);
  const Tensor hidden = at::cat(Tensors{grad_reset, grad_update, grad_fresh * reset}, 1);
  return {input, hidden, grad * update, has_bias ? input.sum(0) : Tensor(),
          has_bias ? hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace
}  // namespace sim
