// The rows of attention, and of what is done to its heads before, in the table of operations; and how they
// are traced. The sizes of a node are H and K; ranks with R > K share key heads.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "llmc/device/heads.h"
#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

// The heads of one rank.
HeadCounts own_heads(const Node& node, int ranks) {
    return {Piece{.count = node.sizes[0]}.of_rank(ranks),
            Piece{.count = node.sizes[1], .can_be_shared = true}.of_rank(ranks)};
}

// The heads of a tensor with rows of `heads` heads of size D; the first is `first`.
Heads heads_in(const Tensor& tensor, std::int64_t heads, std::int64_t first, std::int64_t count,
               std::int64_t D) {
    return {rows_of_heads(tensor, heads * D), first * D, count, D};
}

// ---- attention

// q and k lie in `qk`, v in `packed`; these are one tensor if `packed` is empty.
PackedHeads heads_of(const Running& r, const Tensor& qk, const Tensor& packed, std::int64_t D) {
    const auto [H, K] = own_heads(*r.node, r.ranks.size());
    PackedHeads heads = packed_heads(packed ? packed : qk, H, K, D);
    if (packed) {
        heads.q = heads_in(qk, H + K, 0, H, D);
        heads.k = heads_in(qk, H + K, H, K, D);
    }
    return heads;
}
Operand packed_of(Calls& c) { return c.node().in.size() > 1 ? c.read(1) : Operand{}; }

const Operation attention_row{
    .name = "attention",
    .forward =
        [](Calls& c) {
            c.call<AttentionForward>(
                [](const Running& r, const Tensor* t) {
                    const auto [q, k, v] = heads_of(r, t[2], t[3], t[0].shape.last());
                    return AttentionForward{t[0], t[1], q, k, v, r.node->sizes[2]};
                },
                {c.output(0), c.output(1), c.read(0), packed_of(c)});
        },
    .backward =
        [](Calls& c) {
            const bool is_apart = c.node().in.size() > 1;
            c.call<AttentionBackward>(
                [](const Running& r, const Tensor* t) {
                    const std::int64_t D = t[5].shape.last();
                    const auto [dq, dk, dv] = heads_of(r, t[0], t[1], D);
                    const auto [q, k, v] = heads_of(r, t[3], t[4], D);
                    return AttentionBackward{dq, dk, dv, t[2], q, k, v, t[5], t[6], r.node->sizes[2]};
                },
                {c.make_gradient(0), is_apart ? c.make_gradient(1) : Operand{}, c.gradient(0).for_input(),
                 c.read(0).for_input(), packed_of(c).for_input(), c.output(0, Access::read).for_input(),
                 c.output(1, Access::read).for_input()});
        },
    .rows =
        [](Calls& c) {
            const Operand out = c.output(0);  // (B,T,H,D)
            const std::int64_t K = own_heads(c.node(), c.sizes().split.ranks).keys;
            c.call<AttentionCachedForward>(
                [](const Running& r, const Tensor* t) {
                    // The number of new rows, or of all rows.
                    const std::int64_t made = t[2].shape[1];
                    const Shape heads{t[0].shape[2], t[0].shape[3]};
                    const auto [q, k, v] = heads_of(r, t[2], t[3], heads.last());
                    return AttentionCachedForward{
                        t[0].view(Shape{t[0].elements() / heads.elements()} + heads),
                        t[1],
                        q,
                        k,
                        v,
                        r.rows.position + r.rows.count - made,
                        r.node->sizes[2]};
                },
                {out, c.cache({out.shape[1], 2, K, out.shape[3]}), c.read(0), packed_of(c)});
        },
    .has_cache = true,
    .work =
        [](const Part& part, const Node& node) {
            // Row t sees min(t + 1, W) keys, in all W (2T - W + 1) / 2 instead of T (T + 1) / 2.
            const auto T = static_cast<double>(part.tokens), W = static_cast<double>(node.sizes[2]);
            const double seen = W > 0 && W < T ? W * (2 * T - W + 1) / (T * (T + 1)) : 1;
            return Work{.pairs = 4.0 * static_cast<double>(features_of(part, node.out[0])) * seen};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
            const auto [H, K] = own_heads(node, sizes.split.ranks);
            // A window of 0 is the widest.
            const std::int64_t window = node.sizes[2];
            const bool is_first = request.key_heads == 0;
            request.window = is_first                             ? window
                             : request.window == 0 || window == 0 ? 0
                                                                  : std::max(request.window, window);
            request.queries_apart |= node.in.size() > 1;
            at_least(request.heads, H);
            at_least(request.key_heads, K);
            at_least(request.head_size, part.value(node.out[0]).shape[2]);
        }};

// ---- rotary positions

// sizes[2]: whether the angles are negative
Rope rotate(const Running& r, const Tensor& x, const Tensor& angles, std::int64_t position,
            bool is_backward) {
    const auto [H, K] = own_heads(*r.node, r.ranks.size());
    const std::int64_t D = 2 * angles.shape[1];
    const Heads heads{rows_of_heads(x, x.shape.last() == D ? x.shape[2] * D : x.shape.last()), 0, H + K, D};
    return {heads, angles, position, (r.node->sizes[2] != 0) != is_backward};
}

const Operation rope_row{
    .name = "rope",
    .forward =
        [](Calls& c) {
            c.call<Rope>([](const Running& r, const Tensor* t) { return rotate(r, t[0], t[1], 0, false); },
                         {c.in_place(0, 0), c.angles()});
        },
    .backward =
        [](Calls& c) {
            c.call<Rope>([](const Running& r, const Tensor* t) { return rotate(r, t[0], t[1], 0, true); },
                         {c.changed_gradient(0), c.angles()});
            c.pass_gradient(0, 0);
        },
    .rows =
        [](Calls& c) {
            c.call<Rope>(
                [](const Running& r, const Tensor* t) {
                    // t[0] has the new rows, or all rows.
                    return rotate(r, t[0], t[1], r.rows.position + r.rows.count - t[0].shape[1], false);
                },
                {c.in_place(0, 0), c.angles()});
        },
    .work =
        [](const Part& part, const Node& node) {
            const double rotated = static_cast<double>(node.sizes[0] + node.sizes[1]) *
                                   static_cast<double>(part.value(node.out[0]).shape.last());
            return Work{.other = 3 * rotated, .other_backward = 3 * rotated};
        }};

// ---- norms of heads

// sizes[2]: whether a norm is over all heads
bool is_over_all(const Node& node) { return node.sizes[2] != 0; }
bool shares_rows(const Calls& c) { return c.is_shared() && is_over_all(c.node()); }

// The query heads and the key heads of a tensor with rows of H+K heads, or of H+2K; as one head if the norm
// is over all of them.
std::pair<Heads, Heads> normed_heads(const Running& r, const Tensor& tensor, bool is_packed) {
    if (!tensor) return {};
    const auto [H, K] = own_heads(*r.node, r.ranks.size());
    const std::int64_t D = tensor.shape.last();
    Heads q = heads_in(tensor, H + (is_packed ? 2 : 1) * K, 0, H, D), k = q;
    k.first = H * D;
    k.count = K;
    if (is_over_all(*r.node)) {
        q.size = H * D;
        k.size = K * D;
        q.count = k.count = 1;
    }
    return {q, k};
}

// The sums of the rows of the queries, then of the keys, on all ranks; `sum` writes this rank's. Empty if
// each rank has whole rows.
template <class SumOwn>
std::pair<SharedRows, SharedRows> sums_of_ranks(const Running& r, const Tensor& memory, const Heads& q,
                                                const Heads& k, SumOwn&& sum) {
    if (!memory) return {};
    const std::int64_t R = r.ranks.size(), rows = q.rows.elements() / row_elements(q);
    const auto of = [&](std::int64_t place, const Heads& heads) {
        const Tensor all = memory.flat(place * R * rows, R * rows).view({R, rows});
        const Tensor own = all.slice(r.ranks.rank(), 1).view({rows});
        sum(place, own);
        r.ranks.gather(all, own);
        return SharedRows{.sums = all, .size = heads.size * R};
    };
    return {of(0, q), of(1, k)};
}
Operand memory_of_sums(Calls& c, const Operand& rows) {
    if (!shares_rows(c)) return {};
    return c.local("sums", DType::fp32, {2, c.sizes().split.ranks, rows.shape[0] * rows.shape[1]});
}
std::uint64_t bytes_of_sums(const Calls& c, const Operand& rows) {
    const std::int64_t others = c.sizes().split.ranks - 1;
    return shares_rows(c)
               ? static_cast<std::uint64_t>(2 * others * rows.shape[0] * rows.shape[1]) * sizeof(float)
               : 0;
}

void normalise_heads(const Running& r, const Tensor* t) {
    const auto [q, k] = normed_heads(r, t[3], true);
    const auto [to_q, to_k] = normed_heads(r, t[0], false);
    const auto [of_q, of_k] = sums_of_ranks(r, t[6], q, k, [&](std::int64_t place, const Tensor& own) {
        r.ops.run(HeadNormSums{own, place == 0 ? q : k});
    });
    const auto eps = static_cast<float>(r.node->numbers[0]);
    r.ops.run(HeadNormForward{to_q, t[1], q, t[4], eps, of_q});
    r.ops.run(HeadNormForward{to_k, t[2], k, t[5], eps, of_k});
}

// In the half of the backward pass for the weights there is no din, and the sums are not needed.
void normalise_heads_backward(const Running& r, const Tensor* t) {
    const auto [to_q, to_k] = normed_heads(r, t[0], true);
    const auto [dq, dk] = normed_heads(r, t[3], false);
    const auto [q, k] = normed_heads(r, t[4], true);
    const Tensor sums = t[0] ? t[9] : Tensor{};
    const auto [of_q, of_k] = sums_of_ranks(r, sums, q, k, [&](std::int64_t place, const Tensor& own) {
        r.ops.run(
            HeadNormBackwardSums{own, place == 0 ? dq : dk, place == 0 ? q : k, t[5 + place], t[7 + place]});
    });
    r.ops.run(HeadNormBackward{to_q, t[1], dq, q, t[5], t[7], of_q});
    r.ops.run(HeadNormBackward{to_k, t[2], dk, k, t[6], t[8], of_k});
}

const Operation head_norm_row{
    .name = "head_norm",
    .forward =
        [](Calls& c) {
            const Operand in = c.read(0);
            c.exchange("head_norm_forward", normalise_heads,
                       {c.output(0), c.output(1), c.output(2), in, c.parameter(0), c.parameter(1),
                        memory_of_sums(c, in)},
                       bytes_of_sums(c, in));
        },
    .backward =
        [](Calls& c) {
            const Operand in = c.read(0);
            // Attention has made the gradient of the values, which lie in the same rows.
            c.exchange("head_norm_backward", normalise_heads_backward,
                       {c.add_gradient(0), c.parameter_gradient(0), c.parameter_gradient(1), c.gradient(0),
                        in, c.parameter(0).for_input(), c.parameter(1).for_input(), c.output(1, Access::read),
                        c.output(2, Access::read), memory_of_sums(c, in)},
                       bytes_of_sums(c, in));
        },
    .work = elementwise<4, 12>};

// D, the size of a head. `heads` has the number of heads of each kind, which lie side by side. Each rank has
// its share of every kind.
std::int64_t check_packed(const Trace& t, const Node& node, int packed,
                          const std::vector<std::int64_t>& heads) {
    const Value& value = t[packed];
    const Shape& shape = value.shape;
    std::int64_t all = 0;
    for (const std::int64_t of_kind : heads) all = saturated_sum(all, of_kind);
    std::int64_t found = 1;  // in the dimensions between the tokens and the elements of a head
    for (int i = 1; i < shape.dimensions() - 1; ++i) found = saturated_product(found, shape[i]);
    if (shape.dimensions() < 3 || found != all) {
        t.refuse(node, fmt::format("needs {} heads for each token, but {} has the shape {}", all, value.name,
                                   to_string(shape)));
    }
    // Either a piece for each kind, or a dimension of kinds, each with the same number of heads.
    const bool is_by_kinds = value.divided_dim == 2 && shape[1] == std::ssize(heads) &&
                             std::ranges::all_of(heads, [&](std::int64_t of) { return of == shape[2]; });
    if (!is_by_kinds && !std::ranges::equal(value.pieces, heads, {}, &Piece::count)) {
        t.refuse(node, fmt::format("needs {} heads side by side, but ranks divide {} otherwise",
                                   fmt::join(heads, ", "), value.name));
    }
    return shape.last();
}

Value of_heads(const Trace& t, std::string name, std::vector<Piece> pieces, const Shape& thing) {
    std::int64_t all = 0;
    for (const Piece& piece : pieces) all = saturated_sum(all, piece.count);
    return {.name = std::move(name),
            .shape = Shape{t.tokens(), all} + thing,
            .placement = Placement::divided,
            .pieces = std::move(pieces)};
}

}  // namespace

int attention(Trace& t, const std::string& name, int qkv, const HeadCounts& heads, std::int64_t window,
              std::optional<int> qk) {
    const auto [H, K] = heads;
    Node node{.operation = &attention_row,
              .name = name,
              .in = {qk.value_or(qkv)},
              .takes = Placement::divided,
              .divided_dim = t[qkv].divided_dim,
              .sizes = {H, K, window}};
    const std::int64_t D = check_packed(t, node, qkv, {H, K, K});
    if (qk) {
        check_packed(t, node, *qk, {H, K});
        node.in.push_back(qkv);
    }
    Value out{.name = name, .label = name, .shape = {t.tokens(), H, D}, .placement = Placement::divided};
    Value lse{.name = name + ".lse",
              .shape = {H, t.tokens()},
              .placement = Placement::divided,
              .token_dim = 1,
              .divided_dim = 0,
              .is_fp32 = true};
    return t.add(std::move(node), {std::move(out), std::move(lse)});
}

int rope(Trace& t, int x, const HeadCounts& heads, const RopeAngles& angles, bool inverse) {
    const Node node{.operation = &rope_row,
                    .name = t[x].name,
                    .in = {x},
                    .takes = Placement::divided,
                    .sizes = {heads.queries, heads.keys, inverse ? 1 : 0},
                    .angles = angles};
    if (t[x].shape.last() != angles.head_size || angles.positions < t.tokens())
        t.refuse(node, fmt::format("has no angles for {} of shape {}", t[x].name, to_string(t[x].shape)));
    const auto [H, K] = heads;
    check_packed(t, node, x, t[x].pieces.size() == 2 ? std::vector{H, K} : std::vector{H, K, K});
    Value rotated = t[x];
    rotated.name += ".rotated";
    return t.add(node, {std::move(rotated)});
}

int head_norm(Trace& t, int packed, const HeadCounts& heads, const HeadNorm& norm) {
    const auto [H, K] = heads;
    Node node{.operation = &head_norm_row,
              .name = norm.q.empty() ? t[packed].name : norm.q,
              .in = {packed},
              .takes = Placement::divided,
              .sizes = {H, K, norm.over_all ? 1 : 0},
              .numbers = {norm.eps}};
    const std::int64_t D = check_packed(t, node, packed, {H, K, K});
    // A norm over all heads does not suit ranks that share a key head.
    const Piece queries = t[packed].pieces.at(0), keys{K, t[packed].pieces.at(1).what, !norm.over_all};
    const auto weight = [&](const std::string& name, std::int64_t count) {
        return norm.over_all ? vector_of(name + ".weight", {count, D}, 1, 0)
                             : vector_of(name + ".weight", {D}, 1);
    };
    node.parameters = {t.add_optional(!norm.q.empty(), weight(norm.q, H)),
                       t.add_optional(!norm.k.empty(), weight(norm.k, K))};
    const auto rstd = [&](const char* which, const Piece& of) {
        Value value =
            norm.over_all ? statistic(t, node.name + which) : of_heads(t, node.name + which, {of}, {});
        if (norm.over_all) value.placement = Placement::whole;
        value.is_fp32 = true;
        return value;
    };
    return t.add(node, {of_heads(t, node.name + ".normed", {queries, keys}, {D}), rstd(".q_rstd", queries),
                        rstd(".k_rstd", keys)});
}

}  // namespace llmc
