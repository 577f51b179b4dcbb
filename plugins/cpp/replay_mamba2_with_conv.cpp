// ReplayMamba2WithConv: the causal convolution with SiLU, and Mamba-2 on what it makes, in one node. A step is one launch
// where the image has a kernel for that and it is the faster way, else two; a prefill is two always. Then what was
// convolved is in the workspace between them.
//
//   inputs   0 xBC [B,S,D] activation, D = H P + 2 G N    1 dt [B,S,H] activation
//            2 conv_weight [D,K], 3 conv_bias [D] activation
//            4 conv_ring [slots,R_conv,D] activation, in-out
//            5 A, 6 D, 7 dt_bias [H] float32
//            8 ssm_state [slots,H,P,N] state type, in-out             9 x_ring [slots,R,H,P] activation, in-out
//           10 B_ring [slots,R,G,N] activation, in-out               11 dt_ring [slots,R,H] float32, in-out
//           12 past_lengths  13 checkpoint_lengths  14 num_tokens  15 slot_ids [B] int32
//   outputs  0 y [B,S,H,P] activation   1 conv_ring = input 4   2 ssm_state = 8   3 x_ring = 9   4 B_ring = 10
//            5 dt_ring = 11
//   fields   history, max_draft_len; kernels
//
// The tables in Python: trtllm_replayssm/contract/plugin_io.py.
#include "../kernels/mamba2/params_with_conv.h"

#include "../kernels/common/protocol.h"
#include "causal_conv1d.h"
#include "definitions.h"
#include "log.h"
#include "mamba2.h"
#include "recurrence.h"

namespace replayssm {
namespace {

constexpr char kName[] = "ReplayMamba2WithConv";

enum Input : int32_t {
  kXBC, kDt, kConvWeight, kConvBias, kConvRing, kA, kD, kDtBias, kSsmState, kXRing, kBRing, kDtRing,
  kPastLengths, kCheckpointLengths, kNumTokens, kSlotIds
};
enum Output : int32_t { kY, kConvRingOut, kSsmStateOut, kXRingOut, kBRingOut, kDtRingOut };

std::string dimension_fault(const Dimensions& dimensions, const IntFields& fields) {
  std::string fault = ring_rows_fault("x_ring", dimensions, fields);
  if (fault.empty()) fault = conv_ring_fault("conv_weight", dimensions, 1 + static_cast<int64_t>(fields[kMaxDraftLen]));
  if (fault.empty()) fault = mamba2_groups_fault("B_ring", dimensions);
  if (!fault.empty() || !dimensions.knows("DHPGN")) return fault;
  const int64_t channels = dimensions['H'] * dimensions['P'] + 2 * dimensions['G'] * dimensions['N'];
  if (dimensions['D'] == channels) return "";
  return concat("xBC: found ", dimensions['D'], " channels; needed ", channels, " (H P + 2 G N)");
}

std::string constants(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions, const IntFields& fields) {
  if (!dimensions.knows("HPNGK")) return "";
  return concat(mamba2_constants(dimensions, fields, inputs[kXBC].type, inputs[kSsmState].type, inputs[kDt].type),
                " d_conv=", dimensions['K']);
}

CausalConv1dParams convolution_params(const Dimensions& dimensions, const Buffers& buffers) {
  const void* const* in = buffers.inputs;
  const void* inputs[] = {in[kXBC],         in[kConvWeight], in[kConvBias], in[kConvRing],
                          in[kPastLengths], in[kNumTokens],  in[kSlotIds]};
  void* outputs[] = {buffers.workspace, buffers.outputs[kConvRingOut]};
  return causal_conv1d_params({inputs, outputs}, dimensions, kSilu);
}

// With x, B and C side by side in `channels` [B, S, D], of numbers of `bytes`.
Mamba2Params recurrence_params(const Dimensions& dimensions, const Buffers& buffers, const void* channels,
                               int64_t bytes) {
  const auto* x = static_cast<const unsigned char*>(channels);
  const unsigned char* B = x + dimensions['H'] * dimensions['P'] * bytes;
  const unsigned char* C = B + dimensions['G'] * dimensions['N'] * bytes;
  const void* const* in = buffers.inputs;
  const void* inputs[] = {x,           in[kDt],       B,          C,          in[kA],      in[kD],
                          in[kDtBias], in[kSsmState], in[kXRing], in[kBRing], in[kDtRing],
                          in[kPastLengths], in[kCheckpointLengths], in[kNumTokens], in[kSlotIds]};
  void* const* out = buffers.outputs;
  void* outputs[] = {out[kY], out[kSsmStateOut], out[kXRingOut], out[kBRingOut], out[kDtRingOut]};
  Mamba2Params params = mamba2_params({inputs, outputs, nullptr, buffers.counter}, dimensions);
  params.x_stride_token = params.B_stride_token = params.C_stride_token = dimensions['D'];
  params.x_stride_batch = params.B_stride_batch = params.C_stride_batch = dimensions['S'] * dimensions['D'];
  return params;
}

Mamba2WithConvParams step_params(const Dimensions& dimensions, const Buffers& buffers, int64_t bytes) {
  Mamba2WithConvParams params{};
  params.step = recurrence_params(dimensions, buffers, buffers.inputs[kXBC], bytes);
  params.conv_weight = buffers.inputs[kConvWeight];
  params.conv_bias = buffers.inputs[kConvBias];
  params.conv_ring = buffers.outputs[kConvRingOut];
  params.conv_ring_stride_slot = dimensions['r'] * dimensions['D'];
  params.conv_ring_rows = static_cast<int32_t>(dimensions['r']);
  return params;
}

std::string append_launches(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions,
                            const Fields& fields, const Buffers& buffers, std::vector<KernelLaunch>& launches) {
  constexpr char kOneLaunch[] = "step_with_conv";
  const int64_t bytes = element_bytes(inputs[kXBC].type);
  bool is_one_launch = false;
  if (!replay::is_prefill(dimensions['S'], fields.ints[kMaxDraftLen])) {
    const Mamba2WithConvParams params = step_params(dimensions, buffers, bytes);
    const std::string fault = is_faster(fields.kernels, kOneLaunch, dimensions['B'], is_one_launch);
    if (!fault.empty()) return fault;
    // As the pipelined step itself, of which it is a form.
    const Mamba2Params& step = params.step;
    is_one_launch = is_one_launch && are_in_pieces({step.x, step.B, step.C, step.ssm_state, step.x_ring, step.B_ring,
                                                    params.conv_weight, params.conv_bias, params.conv_ring});
    if (is_one_launch) launches.push_back({kOneLaunch, KernelArgument(params)});
  }
  if (is_one_launch) return "";
  if (buffers.workspace == nullptr) {
    return concat("found no workspace; needed ", bytes_of(inputs[kXBC].type, inputs[kXBC].dims), " bytes");
  }
  const Mamba2Params params = recurrence_params(dimensions, buffers, buffers.workspace, bytes);
  launches.push_back({std::string("conv_") + causal_conv1d_role(dimensions['S']),
                      KernelArgument(convolution_params(dimensions, buffers))});
  launches.push_back({mamba2_role(params, fields.ints), KernelArgument(params)});
  return "";
}

}  // namespace

const PluginDefinition& mamba2_with_conv_definition() {
  static const auto& definition = *new PluginDefinition{
      kName,
      {{{"xBC", "BSD", TypeRule::kActivation},
        {"dt", "BSH", TypeRule::kActivation},
        {"conv_weight", "DK", TypeRule::kActivation},
        {"conv_bias", "D", TypeRule::kActivation},
        {"conv_ring", "srD", TypeRule::kActivation},
        {"A", "H", TypeRule::kFloat},
        {"D", "H", TypeRule::kFloat},
        {"dt_bias", "H", TypeRule::kFloat},
        {"ssm_state", "sHPN", TypeRule::kState},
        {"x_ring", "sRHP", TypeRule::kActivation},
        {"B_ring", "sRGN", TypeRule::kActivation},
        {"dt_ring", "sRH", TypeRule::kFloat},
        {"past_lengths", "B", TypeRule::kInt32},
        {"checkpoint_lengths", "B", TypeRule::kInt32},
        {"num_tokens", "B", TypeRule::kInt32},
        {"slot_ids", "B", TypeRule::kInt32}},
       {{"y", kXBC, false, "BSHP"},
        {"conv_ring", kConvRing, true},
        {"ssm_state", kSsmState, true},
        {"x_ring", kXRing, true},
        {"B_ring", kBRing, true},
        {"dt_ring", kDtRing, true}}},
      recurrence_fields(),
      recurrence_field_fault,
      dimension_fault,
      constants,
      append_launches,
      kXBC};
  return definition;
}

}  // namespace replayssm
