// ReplayCausalConv1d: depthwise causal convolution over a ring of raw inputs.
//
//   inputs   0 x [B,S,D] activation      1 weight [D,K] activation   2 bias [D] activation
//            3 conv_ring [slots,R_conv,D] activation, in-out
//            4 past_lengths  5 num_tokens  6 slot_ids [B] int32
//   outputs  0 y [B,S,D] activation      1 conv_ring = input 3
//   fields   activation: 0 none, 1 silu; kernels
//
// The tables in Python: trtllm_replayssm/contract/plugin_io.py.
#include "causal_conv1d.h"
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
  if (activation == kNoActivation || activation == kSilu) return "";
  return concat("field activation: found ", activation, "; needed 0 (none) or 1 (silu)");
}

std::string dimension_fault(const Dimensions& dimensions, const IntFields&) {
  // A window of T tokens needs d_conv - 1 + T rows for its rejected tokens to leave the history whole, which is the
  // builder's to give: of the window one token is known here.
  return conv_ring_fault("weight", dimensions, 1);
}

std::string constants(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions, const IntFields&) {
  if (!dimensions.knows("DK")) return "";
  return concat("causal_conv1d conv_dim=", dimensions['D'], " d_conv=", dimensions['K'],
                " activation_dtype=", type_text(inputs[kX].type));
}

std::string append_launches(const nvinfer1::PluginTensorDesc*, const Dimensions& dimensions, const Fields& fields,
                            const Buffers& buffers, std::vector<KernelLaunch>& launches) {
  const CausalConv1dParams params = causal_conv1d_params(buffers, dimensions, fields.ints[kActivation]);
  launches.push_back({causal_conv1d_role(dimensions['S']), KernelArgument(params)});
  return "";
}

}  // namespace

std::string conv_ring_fault(const char* weight, const Dimensions& dimensions, int64_t window) {
  if (dimensions.knows("K") && dimensions['K'] < 1) return concat(weight, ": found no taps; needed 1 or more");
  if (!dimensions.knows("Kr")) return "";
  const int64_t rows = dimensions['K'] - 1 + window;
  if (dimensions['r'] >= rows) return "";
  return concat("conv_ring: found ", dimensions['r'], " rows with d_conv = ", dimensions['K'], "; needed at least ", rows,
                " (d_conv - 1 + 1 + max_draft_len)");
}

const char* causal_conv1d_role(int64_t window_tokens) {
  if (window_tokens == 1) return "one_token_step";
  return window_tokens <= LONGEST_STEP_WINDOW ? "step" : "prefill";
}

CausalConv1dParams causal_conv1d_params(const Buffers& buffers, const Dimensions& dimensions, int32_t activation) {
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
  params.conv_ring_stride_slot = dimensions['r'] * channels;
  params.seq_len = static_cast<int32_t>(dimensions['S']);
  params.ring_rows = static_cast<int32_t>(dimensions['r']);
  params.activation = activation;
  params.num_rows = static_cast<int32_t>(dimensions['B']);
  return params;
}

const PluginDefinition& causal_conv1d_definition() {
  static const auto& definition = *new PluginDefinition{
      kName,
      {{{"x", "BSD", TypeRule::kActivation},
        {"weight", "DK", TypeRule::kActivation},
        {"bias", "D", TypeRule::kActivation},
        {"conv_ring", "srD", TypeRule::kActivation},
        {"past_lengths", "B", TypeRule::kInt32},
        {"num_tokens", "B", TypeRule::kInt32},
        {"slot_ids", "B", TypeRule::kInt32}},
       {{"y", kX, false}, {"conv_ring", kConvRing, true}}},
      {"activation"},
      field_fault,
      dimension_fault,
      constants,
      append_launches};
  return definition;
}

}  // namespace replayssm
