// Runs one operation of llmc/device/ops.h by its name, on tensors of the host. The tests against PyTorch and
// against the committed reference files share it.
//
// Inputs and results have the names that ops.h gives the operands. An operand that accumulates, or is changed
// in place, is both an input and a result. An optional operand is used if it is given. Scalars are inputs of
// one element. Further inputs:
//   matmul_forward      with_gelu = 1 asks for pre_gelu
//   matmul_backward     without_din = 1 asks for no din
//   attention_...       heads = (H, K, D), and firsts = the first elements of q, k and v in their rows.
//                       Without k, or without v, these lie in q's rows; likewise dk, dv and dq. dq, dk and dv
//                       are inputs too: what is beside the heads must stay. window, if it is not 0
//   gelu_backward, add  in_place = 1: din is dout, out is a; add: in_place = 2: out is b
//   cast                the dtype is out's; in has the other one
//   copy                the dtype is that of both, any
//   fill                the dtype is out's, any; `out` is an input for its shape
//   quantise            e5m2 = 1: the format is E5M2, not E4M3
//   quantise_to_bytes   e5m2 as there; without_plain or without_transposed = 1
//   fp8_matmul_...      bytes as numbers: NAME, NAME_transposed and NAME_inverse of `in`, `weight` and `dout`; for din
//                       and dweight those that they need
//   on heads            head_calls.h
//   adamw               several steps from 1: gradients (steps, n), norm_squared (steps), learning_rate
//                       (steps); segments (count, 3) of begin, end, weight_decay; the other inputs as in ops.h.
//                       with_norm = 1: norm_squared is 0 before, is computed from the gradients by
//                       global_norm_squared and sum, and is a result. gradients_in_x = 1: gradients are in X.
//                       rounding: the seed and the first element, for stochastic rounding of the parameters
#pragma once

#include "llmc/device/heads.h"
#include "test/probe/head_calls.h"
#include "test/probe/llama_calls.h"
#include "test/probe/operands.h"

namespace llmc::probe {

namespace calls {

inline constexpr DType fp32 = DType::fp32;
inline constexpr DType bf16 = DType::bf16;
inline constexpr DType fp64 = DType::fp64;
inline constexpr DType int32 = DType::int32;

// Workspace for operands of shape (..., channels): one sequence with all their rows.
inline WorkspaceRequest rows_request(DType dtype, const Shape& shape, std::int64_t other_channels = 0) {
    const std::int64_t rows = shape.elements() / shape.last();
    return {.batch = 1,
            .sequence = rows,
            .channels = shape.last(),
            .heads = 1,
            .largest_matmul_channels = std::max(shape.last(), other_channels),
            .head_rows = rows,
            .dtype = dtype};
}

// For `sequences` sequences of `rows` rows. heads: (H, K, D)
inline WorkspaceRequest attention_request(DType dtype, std::int64_t sequences, std::int64_t rows,
                                          const std::vector<double>& heads, std::int64_t window) {
    const auto H = static_cast<std::int64_t>(heads.at(0)), K = static_cast<std::int64_t>(heads.at(1)),
               D = static_cast<std::int64_t>(heads.at(2));
    return {.batch = sequences,
            .sequence = rows,
            .channels = H * D,
            .heads = H,
            .largest_matmul_channels = (H + 2 * K) * D,
            .head_rows = sequences * rows,
            .dtype = dtype,
            .head_size = D,
            .key_heads = K,
            .window = window};
}

inline Shape rows_of(const Shape& shape) { return {shape.elements() / shape.last()}; }

inline Shape with_last(const Shape& shape, std::int64_t last) {
    if (shape.dimensions() == 2) return {shape[0], last};
    if (shape.dimensions() == 3) return {shape[0], shape[1], last};
    user_error("{} is neither (N,C) nor (B,T,C)", to_string(shape));
}

// ---- one function for each operation, in the order of ops.h

inline std::optional<std::int64_t> first_row(Operands& o) {
    if (!o.has("first_row")) return {};
    return static_cast<std::int64_t>(o.scalar("first_row"));
}

inline void encoder_forward(Operands& o, Ops& ops) {
    const Shape& tokens = o.shape("tokens");
    const Shape out{tokens[0], tokens[1], o.shape("wte").last()};
    o.provide_workspace(rows_request(o.X, out));
    ops.encoder_forward(o.out("out", o.X, out), o.in("tokens", int32), o.in("wte", o.X),
                        o.in_if_given("wpe", o.X), first_row(o));
}

inline void encoder_backward(Operands& o, Ops& ops) {
    o.provide_workspace(rows_request(o.X, o.shape("dout")));
    ops.encoder_backward(o.in_out("dwte", fp32), o.in_out_if_given("dwpe", fp32), o.in("dout", o.X),
                         o.in("tokens", int32), first_row(o));
}

inline void layernorm_forward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in");
    o.provide_workspace(rows_request(o.X, in));
    ops.layernorm_forward(o.out("out", o.X, in), o.out("mean", fp32, rows_of(in)),
                          o.out("rstd", fp32, rows_of(in)), o.in("in", o.X), o.in("gamma", o.X),
                          o.in_if_given("beta", o.X));
}

inline void layernorm_backward(Operands& o, Ops& ops) {
    o.provide_workspace(rows_request(o.X, o.shape("in")));
    ops.layernorm_backward(o.in_out_if_given("din", o.X), o.in_out_if_given("dgamma", fp32),
                           o.in_out_if_given("dbeta", fp32), o.in("dout", o.X), o.in("in", o.X),
                           o.in("gamma", o.X), o.in("mean", fp32), o.in("rstd", fp32));
}

inline void fused_residual_layernorm_forward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in1");
    o.provide_workspace(rows_request(o.X, in));
    ops.fused_residual_layernorm_forward(o.out("residual", o.X, in), o.out("out", o.X, in),
                                         o.out("mean", fp32, rows_of(in)), o.out("rstd", fp32, rows_of(in)),
                                         o.in("in1", o.X), o.in("in2", o.X), o.in("gamma", o.X),
                                         o.in_if_given("beta", o.X));
}

inline void matmul_forward(Operands& o, Ops& ops) {
    const Shape out = with_last(o.shape("in"), o.shape("weight")[0]);
    o.provide_workspace(rows_request(o.X, o.shape("in"), out.last()));
    ops.matmul_forward(o.out("out", o.X, out), o.in("in", o.X), o.in("weight", o.X),
                       o.in_if_given("bias", o.X),
                       o.flag("with_gelu") ? o.out("pre_gelu", o.X, out) : Tensor{});
}

inline void matmul_backward(Operands& o, Ops& ops) {
    o.provide_workspace(rows_request(o.X, o.shape("in"), o.shape("dout").last()));
    ops.matmul_backward(o.flag("without_din") ? Tensor{} : o.out("din", o.X, o.shape("in")),
                        o.in_out_if_given("dweight", fp32), o.in_out_if_given("dbias", fp32),
                        o.in("dout", o.X), o.in("in", o.X), o.in("weight", o.X),
                        o.in_if_given("pre_gelu", o.X));
}

inline void gelu_forward(Operands& o, Ops& ops) {
    ops.gelu_forward(o.out("out", o.X, o.shape("in")), o.in("in", o.X));
}

inline void gelu_backward(Operands& o, Ops& ops) {
    const bool in_place = o.flag("in_place");
    const Tensor dout = in_place ? o.in_out("dout", o.X) : o.in("dout", o.X);
    ops.gelu_backward(in_place ? dout : o.out("din", o.X, dout.shape), dout, o.in("in", o.X));
}

inline std::int64_t integer(Operands& o, std::string_view name) {
    return static_cast<std::int64_t>(o.scalar(name));
}

// q, k and v, or their gradients, whose names have `prefix`. tensor(name) is the operand of that name.
template <class F>
PackedHeads heads_of(Operands& o, const std::string& prefix, F&& tensor) {
    const auto number = [&](std::string_view name, std::size_t i) {
        return static_cast<std::int64_t>(o.values(name).at(i));
    };
    const std::int64_t H = number("heads", 0), K = number("heads", 1), D = number("heads", 2);
    const Tensor q = tensor(prefix + "q");
    const Tensor k = o.has(prefix + "k") ? tensor(prefix + "k") : q;
    const Tensor v = o.has(prefix + "v") ? tensor(prefix + "v") : q;
    return {{q, number("firsts", 0), H, D}, {k, number("firsts", 1), K, D}, {v, number("firsts", 2), K, D}};
}
inline PackedHeads heads_in(Operands& o) {
    return heads_of(o, "", [&](const std::string& name) { return o.in(name, o.X); });
}

inline std::int64_t window(Operands& o) { return o.has("window") ? integer(o, "window") : 0; }

inline void attention_forward(Operands& o, Ops& ops) {
    const std::int64_t B = o.shape("q")[0], T = o.shape("q")[1];
    o.provide_workspace(attention_request(o.X, B, T, o.values("heads"), window(o)));
    const auto [q, k, v] = heads_in(o);
    ops.attention_forward(o.out("out", o.X, {B, T, q.count, q.size}), o.out("lse", fp32, {B, q.count, T}), q,
                          k, v, window(o));
}

inline void attention_backward(Operands& o, Ops& ops) {
    const std::int64_t B = o.shape("q")[0], T = o.shape("q")[1];
    o.provide_workspace(attention_request(o.X, B, T, o.values("heads"), window(o)));
    const auto [q, k, v] = heads_in(o);
    const auto [dq, dk, dv] = heads_of(o, "d", [&](const std::string& name) { return o.in_out(name, o.X); });
    ops.attention_backward(dq, dk, dv, o.in("dout", o.X), q, k, v, o.in("out", o.X), o.in("lse", fp32),
                           window(o));
}

inline void attention_cached_forward(Operands& o, Ops& ops) {
    o.provide_workspace(attention_request(o.X, 1, o.shape("cache")[0], o.values("heads"), window(o)));
    const auto [q, k, v] = heads_in(o);
    ops.attention_cached_forward(o.out("out", o.X, {o.shape("q")[0], q.count, q.size}),
                                 o.in_out("cache", o.X), q, k, v, integer(o, "position"), window(o));
}

inline void fused_classifier(Operands& o, Ops& ops) {
    const Shape& logits = o.shape("logits");
    o.provide_workspace(rows_request(o.X, logits));
    ops.fused_classifier(o.in_out("logits", o.X), o.out("losses", fp32, {logits[0]}), o.in("targets", int32),
                         static_cast<std::int64_t>(o.scalar("vocabulary")),
                         static_cast<float>(o.scalar("scale")), o.scalar("write_dlogits") != 0,
                         classifier_terms(o));
}

inline void classifier_statistics(Operands& o, Ops& ops) {
    ops.classifier_statistics(o.out("statistics", fp32, {o.shape("logits")[0], 3}), o.in("logits", o.X),
                              o.in("targets", int32), integer(o, "columns"), integer(o, "first_column"),
                              classifier_terms(o));
}

inline void classifier_from_statistics(Operands& o, Ops& ops) {
    const Shape& logits = o.shape("logits");
    ops.classifier_from_statistics(
        o.in_out("logits", o.X), o.out("losses", fp32, {logits[0]}), o.in("all_statistics", fp32),
        o.in("targets", int32), integer(o, "columns"), integer(o, "first_column"),
        static_cast<float>(o.scalar("scale")), o.scalar("write_dlogits") != 0, classifier_terms(o));
}

inline void global_norm_squared(Operands& o, Ops& ops) {
    ops.global_norm_squared(o.out("partials", fp32, {o.shape("x").elements() / norm_block_elements}),
                            o.in("x", o.X));
}

inline void sum(Operands& o, Ops& ops) {
    o.provide_workspace(rows_request(fp32, {1, 8}));
    ops.sum(o.in_out("out", fp64), o.in("x", fp32));
}

inline std::vector<AdamWSegment> segments_of(const std::vector<double>& table) {
    std::vector<AdamWSegment> segments;
    for (std::size_t i = 0; i + 2 < table.size(); i += 3)
        segments.push_back({static_cast<std::int64_t>(table[i]), static_cast<std::int64_t>(table[i + 1]),
                            static_cast<float>(table[i + 2])});
    return segments;
}

inline void adamw(Operands& o, Ops& ops) {
    const auto number = [&](std::string_view name) { return o.scalar(name); };
    o.provide_workspace(rows_request(o.X, {1, 8}));
    const Tensor master = o.in_out("master", fp32);
    const Tensor parameters = o.X == fp32 ? master : o.in_out("parameters", o.X);
    const Tensor m = o.in_out("m", fp32);
    const Tensor v = o.in_out("v", fp32);
    const Tensor gradients = o.in("gradients", o.flag("gradients_in_x") ? o.X : fp32);
    const bool with_norm = o.flag("with_norm");
    const Tensor norms = with_norm ? o.in_out("norm_squared", fp64) : o.in("norm_squared", fp64);
    const std::vector<AdamWSegment> segments = segments_of(o.values("segments"));
    std::optional<StochasticRounding> rounding;
    if (o.has("rounding")) {
        rounding = {.seed = static_cast<std::uint64_t>(o.values("rounding").at(0)),
                    .first_element = static_cast<std::int64_t>(o.values("rounding").at(1))};
    }

    for (std::int64_t k = 0; k < gradients.shape[0]; ++k) {
        const Tensor gradient = gradients.slice(k, 1).view(master.shape);
        const Tensor norm_squared = norms.flat(k, 1);
        if (with_norm) {
            const Tensor partials = o.scratch("partials", fp32, {gradient.elements() / norm_block_elements});
            ops.global_norm_squared(partials, gradient);
            ops.sum(norm_squared, partials);
        }
        ops.adamw(parameters, master, m, v, gradient, norm_squared, segments,
                  {.step = k + 1,
                   .learning_rate = o.values("learning_rate")[static_cast<std::size_t>(k)],
                   .beta1 = number("beta1"),
                   .beta2 = number("beta2"),
                   .eps = number("eps"),
                   .max_grad_norm = number("max_grad_norm")},
                  rounding);
    }
}

inline void cast(Operands& o, Ops& ops) {
    ops.cast(o.out("out", o.X, o.shape("in")), o.in("in", o.X == fp32 ? bf16 : fp32));
}

inline void copy(Operands& o, Ops& ops) { ops.copy(o.out("out", o.X, o.shape("in")), o.in("in", o.X)); }

inline void fill(Operands& o, Ops& ops) {
    ops.fill(o.in_out("out", o.X), static_cast<float>(o.scalar("value")));
}

inline void add(Operands& o, Ops& ops) {
    const double in_place = o.has("in_place") ? o.scalar("in_place") : 0;
    const Tensor a = in_place == 1 ? o.in_out("a", o.X) : o.in("a", o.X);
    const Tensor b = in_place == 2 ? o.in_out("b", o.X) : o.in("b", o.X);
    ops.add(in_place == 1 ? a : in_place == 2 ? b : o.out("out", o.X, a.shape), a, b);
}

inline void accumulate(Operands& o, Ops& ops) {
    ops.accumulate(o.in_out("out", o.X), o.in("in", o.flag("in_x") ? o.X : fp32),
                   {.seed = static_cast<std::uint64_t>(o.values("rounding").at(0)),
                    .first_element = static_cast<std::int64_t>(o.values("rounding").at(1))},
                   static_cast<std::int64_t>(o.values("rounding").at(2)));
}

inline void amax(Operands& o, Ops& ops) { ops.amax(o.in_out("out", fp32), o.in("x", o.X)); }

inline void quantise(Operands& o, Ops& ops) {
    ops.quantise(o.out("out", o.X, o.shape("x")), o.in("x", o.X), o.in("amax", fp32),
                 o.has("e5m2") ? Fp8::e5m2 : Fp8::e4m3);
}

inline constexpr DType uint8 = DType::uint8;

inline void quantise_to_bytes(Operands& o, Ops& ops) {
    const Shape& x = o.shape("x");
    const Tensor plain = o.flag("without_plain") ? Tensor{} : o.out("plain", uint8, x);
    const Tensor transposed =
        o.flag("without_transposed") ? Tensor{} : o.out("transposed", uint8, {x[1], x[0]});
    ops.quantise_to_bytes({plain, transposed, o.out("inverse", fp32, {1})}, o.in("x", o.X),
                          o.in("amax", fp32), o.flag("e5m2") ? Fp8::e5m2 : Fp8::e4m3);
}

// NAME, NAME_transposed and NAME_inverse, of which a product needs some.
inline Fp8Copies copies_in(Operands& o, const std::string& name) {
    return {o.in_if_given(name, uint8), o.in_if_given(name + "_transposed", uint8),
            o.in_if_given(name + "_inverse", fp32)};
}

inline void fp8_matmul_forward(Operands& o, Ops& ops) {
    const Shape out = with_last(o.shape("in"), o.shape("weight")[0]);
    o.provide_workspace(rows_request(o.X, o.shape("in"), out.last()));
    ops.fp8_matmul_forward(o.out("out", o.X, out), copies_in(o, "in"), copies_in(o, "weight"),
                           o.in_if_given("bias", o.X),
                           o.flag("with_gelu") ? o.out("pre_gelu", o.X, out) : Tensor{});
}

inline void fp8_matmul_backward(Operands& o, Ops& ops) {
    Tensor din;
    if (o.has("dout")) din = o.out("din", o.X, with_last(o.shape("dout"), o.shape("weight_transposed")[0]));
    o.provide_workspace(rows_request(o.X, {1, 8}));
    ops.fp8_matmul_backward(din, o.in_out_if_given("dweight", fp32), copies_in(o, "dout"), copies_in(o, "in"),
                            copies_in(o, "weight"), o.in_if_given("pre_gelu", o.X));
}

inline void all_finite(Operands& o, Ops& ops) { ops.all_finite(o.out("flag", int32, {1}), o.in("x", o.X)); }

}  // namespace calls

using Call = void (*)(Operands&, Ops&);

// Every operation of ops.h.
inline const std::map<std::string, Call, std::less<>>& all_calls() {
    static const std::map<std::string, Call, std::less<>> table = {
        {"encoder_forward", calls::encoder_forward},
        {"encoder_backward", calls::encoder_backward},
        {"layernorm_forward", calls::layernorm_forward},
        {"layernorm_backward", calls::layernorm_backward},
        {"fused_residual_layernorm_forward", calls::fused_residual_layernorm_forward},
        {"rmsnorm_forward", calls::rmsnorm_forward},
        {"rmsnorm_backward", calls::rmsnorm_backward},
        {"fused_residual_rmsnorm_forward", calls::fused_residual_rmsnorm_forward},
        {"matmul_forward", calls::matmul_forward},
        {"matmul_backward", calls::matmul_backward},
        {"gelu_forward", calls::gelu_forward},
        {"gelu_backward", calls::gelu_backward},
        {"swiglu_forward", calls::swiglu_forward},
        {"swiglu_backward", calls::swiglu_backward},
        {"relu_squared_forward", calls::relu_squared_forward},
        {"relu_squared_backward", calls::relu_squared_backward},
        {"attention_forward", calls::attention_forward},
        {"attention_backward", calls::attention_backward},
        {"attention_cached_forward", calls::attention_cached_forward},
        {"rope", calls::rope},
        {"head_norm_forward", calls::head_norm_forward},
        {"head_norm_sums", calls::head_norm_sums},
        {"head_norm_backward", calls::head_norm_backward},
        {"head_norm_backward_sums", calls::head_norm_backward_sums},
        {"fused_classifier", calls::fused_classifier},
        {"classifier_statistics", calls::classifier_statistics},
        {"classifier_from_statistics", calls::classifier_from_statistics},
        {"soft_cap", calls::soft_cap},
        {"global_norm_squared", calls::global_norm_squared},
        {"sum", calls::sum},
        {"adamw", calls::adamw},
        {"cast", calls::cast},
        {"copy", calls::copy},
        {"fill", calls::fill},
        {"add", calls::add},
        {"accumulate", calls::accumulate},
        {"amax", calls::amax},
        {"quantise", calls::quantise},
        {"quantise_to_bytes", calls::quantise_to_bytes},
        {"fp8_matmul_forward", calls::fp8_matmul_forward},
        {"fp8_matmul_backward", calls::fp8_matmul_backward},
        {"all_finite", calls::all_finite}};
    return table;
}

// The call threw: the device lacks it, or an input does not fit it.
class Refused : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Calls the operation `op` with X = `dtype` and returns everything it wrote. Throws Refused, and a UserError if there
// is no such operation.
inline HostTensors run_op(Device& device, std::string_view op, DType dtype, const HostTensors& inputs,
                          Workspace& workspace) {
    const auto call = all_calls().find(op);
    if (call == all_calls().end()) user_error("there is no operation {}", op);
    Operands operands(device, dtype, inputs, workspace);
    try {
        call->second(operands, device.ops());
    } catch (const std::exception& why) {
        throw Refused(why.what());
    }
    return operands.results();
}
inline HostTensors run_op(Device& device, std::string_view op, DType dtype, const HostTensors& inputs) {
    Workspace workspace(device);
    return run_op(device, op, dtype, inputs, workspace);
}

}  // namespace llmc::probe
