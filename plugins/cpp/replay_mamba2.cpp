// ReplayMamba2: decode, verification and prefill of a Mamba-2 state-space layer from a checkpoint and rings.
//
//   inputs   0 x [B,S,H,P] activation    1 dt [B,S,H] activation     2 B, 3 C [B,S,G,N] activation
//            4 A, 5 D, 6 dt_bias [H] float32
//            7 ssm_state [slots,H,P,N] state type, in-out             8 x_ring [slots,R,H,P] activation, in-out
//            9 B_ring [slots,R,G,N] activation, in-out               10 dt_ring [slots,R,H] float32, in-out
//           11 past_lengths  12 checkpoint_lengths  13 num_tokens  14 slot_ids [B] int32
//   outputs  0 y [B,S,H,P] activation    1 ssm_state = input 7   2 x_ring = 8   3 B_ring = 9   4 dt_ring = 10
//   fields   history, max_draft_len; kernels
//
// The tables in Python: trtllm_replayssm/contract/plugin_io.py.
#include "mamba2.h"

#include <cstdint>

#include "definitions.h"
#include "log.h"
#include "recurrence.h"

namespace replayssm {
namespace {

constexpr char kName[] = "ReplayMamba2";

enum Input : int32_t {
  kX, kDt, kB, kC, kA, kD, kDtBias, kSsmState, kXRing, kBRing, kDtRing,
  kPastLengths, kCheckpointLengths, kNumTokens, kSlotIds
};
enum Output : int32_t { kY, kSsmStateOut, kXRingOut, kBRingOut, kDtRingOut };

std::string dimension_fault(const Dimensions& dimensions, const IntFields& fields) {
  const std::string fault = ring_rows_fault("x_ring", dimensions, fields);
  return fault.empty() ? mamba2_groups_fault("B", dimensions) : fault;
}

std::string constants(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions, const IntFields& fields) {
  return mamba2_constants(dimensions, fields, inputs[kX].type, inputs[kSsmState].type, inputs[kDt].type);
}

std::string append_launches(const nvinfer1::PluginTensorDesc*, const Dimensions& dimensions, const Fields& fields,
                            const Buffers& buffers, std::vector<KernelLaunch>& launches) {
  const Mamba2Params params = mamba2_params(buffers, dimensions);
  launches.push_back({mamba2_role(params, fields.ints), KernelArgument(params)});
  return "";
}

}  // namespace

std::string mamba2_groups_fault(const char* name, const Dimensions& dimensions) {
  if (!dimensions.knows("HG") || (dimensions['G'] >= 1 && dimensions['H'] % dimensions['G'] == 0)) return "";
  return concat(name, ": found ", dimensions['G'], " groups with ", dimensions['H'],
                " heads; needed heads in equal groups");
}

std::string mamba2_constants(const Dimensions& dimensions, const IntFields& fields, nvinfer1::DataType activation,
                             nvinfer1::DataType state, nvinfer1::DataType dt) {
  if (!dimensions.knows("HPNG")) return "";
  return concat("mamba2 n_heads=", dimensions['H'], " head_dim=", dimensions['P'], " d_state=", dimensions['N'],
                " n_groups=", dimensions['G'], " ", recurrence_constants(fields, activation, state), " dt_dtype=",
                type_text(dt));
}

const char* mamba2_role(const Mamba2Params& params, const IntFields& fields) {
  return recurrence_role(params.seq_len, fields,
                         {params.x, params.B, params.C, params.ssm_state, params.x_ring, params.B_ring});
}

Mamba2Params mamba2_params(const Buffers& buffers, const Dimensions& dimensions) {
  const int64_t S = dimensions['S'], H = dimensions['H'], P = dimensions['P'];
  const int64_t G = dimensions['G'], N = dimensions['N'], R = dimensions['R'];
  Mamba2Params params{};
  params.x = buffers.inputs[kX];
  params.dt = buffers.inputs[kDt];
  params.B = buffers.inputs[kB];
  params.C = buffers.inputs[kC];
  params.A = static_cast<const float*>(buffers.inputs[kA]);
  params.D = static_cast<const float*>(buffers.inputs[kD]);
  params.dt_bias = static_cast<const float*>(buffers.inputs[kDtBias]);
  params.ssm_state = buffers.outputs[kSsmStateOut];
  params.x_ring = buffers.outputs[kXRingOut];
  params.B_ring = buffers.outputs[kBRingOut];
  params.dt_ring = static_cast<float*>(buffers.outputs[kDtRingOut]);
  params.past_lengths = static_cast<const int32_t*>(buffers.inputs[kPastLengths]);
  params.checkpoint_lengths = static_cast<const int32_t*>(buffers.inputs[kCheckpointLengths]);
  params.num_tokens = static_cast<const int32_t*>(buffers.inputs[kNumTokens]);
  params.slot_ids = static_cast<const int32_t*>(buffers.inputs[kSlotIds]);
  params.y = buffers.outputs[kY];
  params.num_taken = buffers.counter;
  params.x_stride_batch = S * H * P;
  params.x_stride_token = H * P;
  params.x_stride_head = P;
  params.dt_stride_batch = S * H;
  params.dt_stride_token = H;
  params.B_stride_batch = params.C_stride_batch = S * G * N;
  params.B_stride_token = params.C_stride_token = G * N;
  params.B_stride_group = params.C_stride_group = N;
  params.ssm_state_stride_slot = H * P * N;
  params.x_ring_stride_slot = R * H * P;
  params.B_ring_stride_slot = R * G * N;
  params.dt_ring_stride_slot = R * H;
  params.seq_len = static_cast<int32_t>(S);
  params.ring_rows = static_cast<int32_t>(R);
  params.num_rows = static_cast<int32_t>(dimensions['B']);
  params.num_slots = static_cast<int32_t>(dimensions['s']);
  return params;
}

const PluginDefinition& mamba2_definition() {
  static const auto& definition = *new PluginDefinition{
      kName,
      {{{"x", "BSHP", TypeRule::kActivation},
        {"dt", "BSH", TypeRule::kActivation},
        {"B", "BSGN", TypeRule::kActivation},
        {"C", "BSGN", TypeRule::kActivation},
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
       {{"y", kX, false},
        {"ssm_state", kSsmState, true},
        {"x_ring", kXRing, true},
        {"B_ring", kBRing, true},
        {"dt_ring", kDtRing, true}}},
      recurrence_fields(),
      recurrence_field_fault,
      dimension_fault,
      constants,
      append_launches};
  return definition;
}

}  // namespace replayssm
