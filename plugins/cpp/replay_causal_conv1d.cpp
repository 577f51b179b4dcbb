// ReplayCausalConv1d: depthwise causal convolution over a ring of raw inputs.
//
//   inputs   0 x [B,S,D] activation      1 weight [D,K] activation   2 bias [D] activation
//            3 conv_ring [slots,R,D] activation, in-out
//            4 past_lengths  5 num_tokens  6 slot_ids [B] int32
//   outputs  0 y [B,S,D] activation      1 conv_ring = input 3
//   fields   activation: 0 none, 1 silu; kernels
//
// The tables in Python: trtllm_replayssm/contract/plugin_io.py.
#include "../kernels/causal_conv1d/params.h"
#include "definitions.h"
#include "log.h"

namespace replayssm {
namespace {

constexpr char kName[] = "ReplayCausalConv1d";

enum Input : int32_t { kX, kWeight, kBias, kConvRing, kPastLengths, kNumTokens, kSlotIds };
enum Output : int32_t { kY, kConvRingOut };
enum Field : std::size_t { kActivation };

std::string field_fault(const IntFields& fields) {
  const int32_t activation = fields[kActivation];
  if (activation == 0 || activation == 1) return "";
  return concat("field activation: found ", activation, "; needed 0 (none) or 1 (silu)");
}

std::string dimension_fault(const Dimensions& dimensions, const IntFields&) {
  if (dimensions.knows("K") && dimensions['K'] < 1) return "weight: found no taps; needed 1 or more";
  if (!dimensions.knows("KR")) return "";
  // d_conv - 1 rows before the window and one token of it; a window of T tokens needs d_conv - 1 + T rows for its
  // rejected tokens to leave the history whole, which is the builder's to give.
  if (dimensions['R'] >= dimensions['K']) return "";
  return concat("conv_ring: found ", dimensions['R'], " rows with d_conv = ", dimensions['K'], "; needed at least ",
                dimensions['K'], " (d_conv - 1 + 1 + max_draft_len)");
}

std::string constants(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions, const IntFields&) {
  if (!dimensions.knows("DK")) return "";
  return concat("causal_conv1d conv_dim=", dimensions['D'], " d_conv=", dimensions['K'],
                " activation_dtype=", type_text(inputs[kX].type));
}

const char* role(const Buffers&, int64_t window_tokens, const IntFields&) {
  if (window_tokens == 1) return "one_token_step";
  return window_tokens <= LONGEST_STEP_WINDOW ? "step" : "prefill";
}

void pack(const Buffers& buffers, const Dimensions& dimensions, const IntFields& fields, KernelArgument& argument) {
  const int64_t channels = dimensions['D'];
  CausalConv1dParams params{};
  params.x = buffers.inputs[kX];
  params.weight = buffers.inputs[kWeight];
  params.bias = buffers.inputs[kBias];
  params.conv_ring = buffers.outputs[kConvRingOut];
  params.past_lengths = static_cast<const int32_t*>(buffers.inputs[kPastLengths]);
  params.num_tokens = static_cast<const int32_t*>(buffers.inputs[kNumTokens]);
  params.slot_ids = static_cast<const int32_t*>(buffers.inputs[kSlotIds]);
  params.y = buffers.outputs[kY];
  params.x_stride_batch = dimensions['S'] * channels;
  params.x_stride_token = channels;
  params.conv_ring_stride_slot = dimensions['R'] * channels;
  params.seq_len = static_cast<int32_t>(dimensions['S']);
  params.ring_rows = static_cast<int32_t>(dimensions['R']);
  params.activation = fields[kActivation];
  params.num_rows = static_cast<int32_t>(dimensions['B']);
  argument.set(params);
}

}  // namespace

const PluginDefinition& causal_conv1d_definition() {
  static const auto& definition = *new PluginDefinition{
      kName,
      {{{"x", "BSD", TypeRule::kActivation},
        {"weight", "DK", TypeRule::kActivation},
        {"bias", "D", TypeRule::kActivation},
        {"conv_ring", "sRD", TypeRule::kActivation},
        {"past_lengths", "B", TypeRule::kInt32},
        {"num_tokens", "B", TypeRule::kInt32},
        {"slot_ids", "B", TypeRule::kInt32}},
       {{"y", kX, false}, {"conv_ring", kConvRing, true}}},
      {"activation"},
      field_fault,
      dimension_fault,
      constants,
      role,
      pack};
  return definition;
}

}  // namespace replayssm
