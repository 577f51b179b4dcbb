// ReplayGatedDeltaNet: decode, verification and prefill of a Gated DeltaNet layer from a checkpoint and rings.
//
//   inputs   0 q, 1 k [B,S,Hk,K] activation   2 v [B,S,Hv,V] activation   3 a, 4 b [B,S,Hv] activation
//            5 A_log, 6 dt_bias [Hv] float32
//            7 ssm_state [slots,Hv,K,V] state type, in-out                8 k_ring [slots,R,Hk,K] activation, in-out
//            9 u_ring [slots,R,Hv,V] float32, in-out                     10 g_ring [slots,R,Hv] float32, in-out
//           11 past_lengths  12 checkpoint_lengths  13 num_tokens  14 slot_ids [B] int32
//   outputs  0 o [B,S,Hv,V] activation    1 ssm_state = input 7   2 k_ring = 8   3 u_ring = 9   4 g_ring = 10
//   fields   history, max_draft_len; kernels
//
// The tables in Python: trtllm_replayssm/contract/plugin_io.py.
#include "../kernels/gated_delta_net/params.h"
#include "definitions.h"
#include "log.h"
#include "recurrence.h"

namespace replayssm {
namespace {

constexpr char kName[] = "ReplayGatedDeltaNet";

enum Input : int32_t {
  kQ, kK, kV, kA, kB, kALog, kDtBias, kSsmState, kKRing, kURing, kGRing,
  kPastLengths, kCheckpointLengths, kNumTokens, kSlotIds
};
enum Output : int32_t { kO, kSsmStateOut, kKRingOut, kURingOut, kGRingOut };

// Letters of the table: k = Hk, v = Hv.
std::string dimension_fault(const Dimensions& dimensions, const IntFields& fields) {
  const std::string fault = ring_rows_fault("k_ring", dimensions, fields);
  if (!fault.empty() || !dimensions.knows("kv")) return fault;
  if (dimensions['k'] >= 1 && dimensions['v'] % dimensions['k'] == 0) return "";
  return concat("v: found ", dimensions['v'], " heads with ", dimensions['k'],
                " heads of q and k; needed heads in equal groups");
}

std::string constants(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions, const IntFields& fields) {
  if (!dimensions.knows("kvKV")) return "";
  return concat("gated_delta_net n_key_heads=", dimensions['k'], " n_value_heads=", dimensions['v'],
                " key_dim=", dimensions['K'], " value_dim=", dimensions['V'], " ",
                recurrence_constants(fields, inputs[kQ].type, inputs[kSsmState].type), " gate_dtype=",
                type_text(inputs[kA].type));
}

std::string append_launches(const nvinfer1::PluginTensorDesc*, const Dimensions& dimensions, const Fields& fields,
                            const Buffers& buffers, std::vector<KernelLaunch>& launches) {
  const void* const* inputs = buffers.inputs;
  void* const* outputs = buffers.outputs;
  const int64_t S = dimensions['S'], R = dimensions['R'];
  const int64_t Hk = dimensions['k'], K = dimensions['K'], Hv = dimensions['v'], V = dimensions['V'];
  GatedDeltaNetParams params{};
  params.q = inputs[kQ];
  params.k = inputs[kK];
  params.v = inputs[kV];
  params.a = inputs[kA];
  params.b = inputs[kB];
  params.A_log = static_cast<const float*>(inputs[kALog]);
  params.dt_bias = static_cast<const float*>(inputs[kDtBias]);
  params.ssm_state = outputs[kSsmStateOut];
  params.k_ring = outputs[kKRingOut];
  params.u_ring = static_cast<float*>(outputs[kURingOut]);
  params.g_ring = static_cast<float*>(outputs[kGRingOut]);
  params.past_lengths = static_cast<const int32_t*>(inputs[kPastLengths]);
  params.checkpoint_lengths = static_cast<const int32_t*>(inputs[kCheckpointLengths]);
  params.num_tokens = static_cast<const int32_t*>(inputs[kNumTokens]);
  params.slot_ids = static_cast<const int32_t*>(inputs[kSlotIds]);
  params.o = outputs[kO];
  params.num_taken = buffers.counter;
  params.q_stride_batch = params.k_stride_batch = S * Hk * K;
  params.q_stride_token = params.k_stride_token = Hk * K;
  params.q_stride_head = params.k_stride_head = K;
  params.v_stride_batch = S * Hv * V;
  params.v_stride_token = Hv * V;
  params.v_stride_head = V;
  params.a_stride_batch = params.b_stride_batch = S * Hv;
  params.a_stride_token = params.b_stride_token = Hv;
  params.ssm_state_stride_slot = Hv * K * V;
  params.k_ring_stride_slot = R * Hk * K;
  params.u_ring_stride_slot = R * Hv * V;
  params.g_ring_stride_slot = R * Hv;
  params.seq_len = static_cast<int32_t>(S);
  params.ring_rows = static_cast<int32_t>(R);
  params.num_rows = static_cast<int32_t>(dimensions['B']);
  params.num_slots = static_cast<int32_t>(dimensions['s']);
  const char* role = recurrence_role(
      S, fields.ints,
      {inputs[kQ], inputs[kK], inputs[kV], outputs[kSsmStateOut], outputs[kKRingOut], outputs[kURingOut]});
  launches.push_back({role, KernelArgument(params)});
  return "";
}

}  // namespace

const PluginDefinition& gated_delta_net_definition() {
  static const auto& definition = *new PluginDefinition{
      kName,
      {{{"q", "BSkK", TypeRule::kActivation},
        {"k", "BSkK", TypeRule::kActivation},
        {"v", "BSvV", TypeRule::kActivation},
        {"a", "BSv", TypeRule::kActivation},
        {"b", "BSv", TypeRule::kActivation},
        {"A_log", "v", TypeRule::kFloat},
        {"dt_bias", "v", TypeRule::kFloat},
        {"ssm_state", "svKV", TypeRule::kState},
        {"k_ring", "sRkK", TypeRule::kActivation},
        {"u_ring", "sRvV", TypeRule::kFloat},
        {"g_ring", "sRv", TypeRule::kFloat},
        {"past_lengths", "B", TypeRule::kInt32},
        {"checkpoint_lengths", "B", TypeRule::kInt32},
        {"num_tokens", "B", TypeRule::kInt32},
        {"slot_ids", "B", TypeRule::kInt32}},
       {{"o", kV, false},
        {"ssm_state", kSsmState, true},
        {"k_ring", kKRing, true},
        {"u_ring", kURing, true},
        {"g_ring", kGRing, true}}},
      recurrence_fields(),
      recurrence_field_fault,
      dimension_fault,
      constants,
      append_launches};
  return definition;
}

}  // namespace replayssm
