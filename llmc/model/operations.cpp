// The table of operations: for each, its calls forward and backward, its work and its workspace. Norms,
// products, activations and attention have files of their own.
#include "llmc/model/operations.h"

#include <fmt/format.h>

#include <utility>

#include "llmc/model/operation_rows.h"

namespace llmc {

namespace {

// ---- embedding

// The first row of the table on this rank; empty if it has all rows. The rank with a token's row adds it; one
// rank adds the positions.
std::optional<std::int64_t> first_row(const TensorParallel& ranks, const Tensor& table) {
    if (!ranks.is_shared()) return std::nullopt;
    return ranks.rank() * table.shape[0];
}

template <bool OfRows>
void call_embed(Calls& c) {
    c.call<EncoderForward>(
        [](const Running& r, const Tensor* t) {
            const Tensor positions = OfRows && t[3] ? t[3].slice(r.rows.position, r.rows.count) : t[3];
            return EncoderForward{t[0], t[1], t[2], positions, first_row(r.ranks, t[2])};
        },
        {c.output(0), c.tokens(), c.parameter(0), c.on_first_rank_only(c.parameter(1))});
}

const Operation embedding_row{
    .name = "embedding",
    .forward = call_embed<false>,
    .backward =
        [](Calls& c) {
            if (c.is_frozen(0)) return;
            c.call<EncoderBackward>(
                [](const Running& r, const Tensor* t) {
                    return EncoderBackward{t[0], t[1], t[2], t[3], first_row(r.ranks, t[0])};
                },
                {c.parameter_gradient(0), c.parameter_gradient(1), c.gradient(0), c.tokens()});
        },
    .rows = call_embed<true>,
    .takes_tokens = true,
    .work = elementwise<1, 2>,
    .workspace = ask_for_rows};

// ---- sums, and exchanges between ranks

// The bytes that each rank sends to all-gather or reduce-scatter `whole`.
std::uint64_t gathered_bytes(const Calls& c, const Operand& whole) {
    const auto bytes = static_cast<std::uint64_t>(whole.shape.elements()) * size_of(whole.dtype);
    const auto ranks = static_cast<std::uint64_t>(c.sizes().split.ranks);
    return bytes / ranks * (ranks - 1);
}
std::uint64_t summed_bytes(const Calls& c, const Operand& whole) {
    const auto bytes = static_cast<std::uint64_t>(whole.shape.elements()) * size_of(whole.dtype);
    return all_reduce_bytes(bytes, size_of(whole.dtype), static_cast<std::uint64_t>(c.sizes().split.ranks));
}

constexpr RunCall gather_tokens = [](const Running& r, const Tensor* t) { r.ranks.gather(t[0], t[1]); };
constexpr RunCall sum_addends = [](const Running& r, const Tensor* t) { r.ranks.all_reduce(t[0]); };
constexpr RunCall sum_own_tokens = [](const Running& r, const Tensor* t) {
    r.ranks.reduce_scatter(t[0], t[1]);
};

const Operation add_row{.name = "add",
                        .forward =
                            [](Calls& c) {
                                c.call<Add>({c.output(0), c.read(0), c.read(1)});
                            },
                        .backward =
                            [](Calls& c) {
                                c.pass_gradient(0, 0);
                                c.pass_gradient(1, 0);
                            },
                        .work = elementwise<1, 0>};

void call_gather(Calls& c) {
    if (!c.divides_tokens()) return c.alias(0, 0);
    const Operand all = c.output(0);
    c.exchange("all_gather", gather_tokens, {all, c.read(0)}, gathered_bytes(c, all));
}

const Operation gather_row{.name = "gather",
                           .forward = call_gather,
                           .backward =
                               [](Calls& c) {
                                   if (c.divides_tokens()) {
                                       const Operand addend = c.gradient(0);
                                       c.exchange("reduce_scatter", sum_own_tokens,
                                                  {c.own_gradient(0, 0), addend}, gathered_bytes(c, addend));
                                   } else {
                                       if (c.is_shared()) {
                                           const Operand addend = c.changed_gradient(0);
                                           c.exchange("all_reduce", sum_addends, {addend},
                                                      summed_bytes(c, addend));
                                       }
                                       c.pass_gradient(0, 0);
                                   }
                               },
                           .recompute = call_gather,
                           .recomputed = 0,
                           .is_always_recomputed = true,
                           .work = elementwise<0, 0>};

const Operation scatter_row{
    .name = "scatter",
    .forward =
        [](Calls& c) {
            if (!c.is_shared()) return c.alias(0, 0);
            if (c.divides_tokens()) {
                const Operand addend = c.read(0);
                c.exchange("reduce_scatter", sum_own_tokens, {c.own_tokens(0, 0), addend},
                           gathered_bytes(c, addend));
            } else {
                const Operand sum = c.in_place(0, 0);
                c.exchange("all_reduce", sum_addends, {sum}, summed_bytes(c, sum));
            }
        },
    .backward =
        [](Calls& c) {
            if (!c.divides_tokens()) return c.pass_gradient(0, 0);
            const Operand own = c.gradient(0), all = c.make_gradient(0);
            c.exchange("all_gather", gather_tokens, {all, own}, gathered_bytes(c, all));
        },
    .work = elementwise<0, 0>};

// The same value with another placement.
int trace_exchange(Trace& t, const Operation& row, int value, Placement takes, Placement leaves,
                   const char* what) {
    Value made = t[value];
    made.name += what;
    made.placement = leaves;
    return t.add({.operation = &row, .name = t[value].name, .in = {value}, .takes = takes},
                 {std::move(made)});
}

void check_tables(const Trace& t, const Node& node, const ParamSpec& table,
                  const std::optional<ParamSpec>& positions) {
    if (table.shape.dimensions() != 2)
        t.refuse(node, fmt::format("needs a table of rows, but {} has the shape {}", table.name,
                                   to_string(table.shape)));
    if (positions && (positions->shape.dimensions() != 2 || positions->shape.last() != table.shape.last()))
        t.refuse(node, fmt::format("adds {} of shape {} to rows of {} channels", positions->name,
                                   to_string(positions->shape), table.shape.last()));
}

}  // namespace

ParamSpec vocabulary_table(const std::string& name, std::int64_t vocabulary, std::int64_t channels,
                           const Init& init) {
    return {.name = name,
            .shape = {vocabulary, channels},
            .init = init,
            .tensor_dim = 0,
            .row_multiple = vocabulary_multiple};
}

int embedding(Trace& t, const ParamSpec& table, const std::optional<ParamSpec>& positions) {
    Value sum = stream(t, "embedding", unit_of(table.name), table.shape.last());
    if (positions) sum.label += " + " + unit_of(positions->name);
    sum.placement = Placement::partial;
    check_tables(t, {.operation = &embedding_row, .name = table.name}, table, positions);
    const int rows = t.add(table);
    return t.add({.operation = &embedding_row,
                  .name = table.name,
                  .parameters = {rows, positions ? t.add(*positions) : -1}},
                 {std::move(sum)});
}

int add(Trace& t, int a, int b) {
    const Node node{.operation = &add_row, .name = t[b].label.empty() ? t[b].name : t[b].label, .in = {a, b}};
    check_widths(t, node);
    return t.add(node, {stream(t, t[b].name + ".sum", t[b].label, t[a].features())});
}

int gather(Trace& t, int stream) {
    return trace_exchange(t, gather_row, stream, Placement::stream, Placement::whole, ".gathered");
}

int scatter(Trace& t, int addend) {
    return trace_exchange(t, scatter_row, addend, Placement::partial, Placement::stream, ".scattered");
}

}  // namespace llmc
