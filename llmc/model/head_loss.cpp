// The operation of the head: logits and losses, as a row of the table of operations. Logits are computed for
// a few rows at a time, so that the full (B*T,V) logits never exist. Their gradients overwrite them.
#include <algorithm>

#include "llmc/model/draft.h"
#include "llmc/model/operation.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

// The part of the vocabulary (columns of the logits) that a tensor-parallel rank has.
struct Columns {
    std::int64_t first, count;
};
Columns columns_of(const Running& r, const Tensor& table) {
    const std::int64_t stored = table.shape[0], first = r.ranks.rank() * stored;
    return {first, std::clamp<std::int64_t>(r.node->sizes[0] - first, 0, stored)};
}

// The operands of all calls; those of the gradients come last.
namespace at {
enum { losses, targets, input, table, logits, statistics, all_columns, dinput, dtable };
}

ClassifierTerms terms_of(const Node& node) {
    return {.cap = static_cast<float>(node.numbers[0]), .z_loss = static_cast<float>(node.numbers[1])};
}

template <bool Gradients>
void losses(const Running& r, const Tensor* t) {
    const Tensor all_rows = t[at::input].rows();
    const Columns columns = columns_of(r, t[at::table]);
    const std::int64_t rows_at_a_time = t[at::logits].shape[0];
    const ClassifierTerms terms = terms_of(*r.node);
    for (std::int64_t first = 0; first < all_rows.shape[0]; first += rows_at_a_time) {
        const std::int64_t count = std::min(rows_at_a_time, all_rows.shape[0] - first);
        const Tensor logits = t[at::logits].slice(0, count), rows = all_rows.slice(first, count);
        const Tensor losses = t[at::losses].flat(first, count);
        const Tensor targets = t[at::targets].flat(first, count);
        r.ops.run(MatmulForward{logits, rows, t[at::table], {}});
        if (!r.ranks.is_shared()) {
            r.ops.run(
                FusedClassifier{logits, losses, targets, columns.count, r.loss_scale, Gradients, terms});
        } else {
            const std::int64_t ranks = r.ranks.size();
            const Tensor all = t[at::statistics].flat(0, ranks * count * 3).view({ranks, count, 3});
            const Tensor own = all.slice(r.ranks.rank(), 1).view({count, 3});
            r.ops.run(ClassifierStatistics{own, logits, targets, columns.count, columns.first, terms});
            r.ranks.gather(all, own);
            r.ops.run(ClassifierFromStatistics{logits, losses, all, targets, columns.count, columns.first,
                                               r.loss_scale, Gradients, terms});
        }
        if constexpr (Gradients)
            r.ops.run(MatmulBackward{
                t[at::dinput].rows().slice(first, count), t[at::dtable], {}, logits, rows, t[at::table]});
    }
}

// Computes the logits of one row, for all columns in the order of the vocabulary.
void logits_of_row(const Running& r, const Tensor* t) {
    const Tensor logits = t[at::logits].slice(0, 1), all = t[at::all_columns];
    r.ops.run(MatmulForward{logits, t[at::input].rows(), t[at::table], {}});
    if (const float cap = terms_of(*r.node).cap; cap > 0) r.ops.run(SoftCap{logits, logits, cap});
    if (r.ranks.is_shared()) r.ranks.gather(all.flat(0, all.elements()), logits.flat(0, logits.elements()));
}

void call_losses(Calls& c, std::string_view name, RunCall run, const Operand& dinput, const Operand& dtable) {
    const PartSizes& s = c.sizes();
    const std::int64_t R = s.split.ranks;
    const Operand losses = c.output(0), input = c.read(0), table = c.parameter(0);
    const Operand logits = c.local("logits", s.dtype, {s.logits_rows, table.shape[0]});
    Operand statistics, columns;
    if (c.is_shared()) {
        statistics = c.local("statistics", DType::fp32, {R, s.logits_rows, 3});
        columns = c.local("all columns", s.dtype, {R, table.shape[0]});
    }
    const auto statistics_of_all = static_cast<std::uint64_t>(losses.shape.elements() * 3 * (R - 1));
    c.exchange(name, run, {losses, c.targets(), input, table, logits, statistics, columns, dinput, dtable},
               statistics_of_all * sizeof(float));
}

const Operation head_loss_row{
    .name = "head_loss",
    .forward = [](Calls& c) { call_losses(c, "losses", losses<false>, {}, {}); },
    .backward =
        [](Calls& c) {
            const Operand dinput = c.make_gradient(0);
            call_losses(c, "losses and gradients", losses<true>, dinput, c.parameter_gradient(0));
        },
    .rows = [](Calls& c) { call_losses(c, "logits", logits_of_row, {}, {}); },
    .is_forward_in_backward = true,
    .work =
        [](const Part& part, const Node& node) {
            const std::int64_t C = part.value(node.in[0]).features();
            return Work{.products = 2.0 * static_cast<double>(C) * static_cast<double>(node.sizes[0])};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
            const ParamSpec& table = part.parameters[static_cast<std::size_t>(node.parameters[0])].spec;
            request.vocabulary = std::max(request.vocabulary, stored_shape(table, sizes.split.ranks)[0]);
            request.largest_matmul_channels = std::max(request.largest_matmul_channels, request.vocabulary);
        }};

}  // namespace

void head_loss(Trace& t, int x, const ParamSpec& table, bool is_tied, const ClassifierTerms& terms) {
    const Node node{.operation = &head_loss_row,
                    .name = "lm_head",
                    .in = {x},
                    .takes = Placement::whole,
                    .parameters = {t.add(table, is_tied)},
                    .sizes = {table.shape[0]},
                    .numbers = {terms.cap, terms.z_loss}};
    if (table.shape.last() != t[x].features()) t.refuse(node, "takes a table of another width");
    t.add(node, {Value{.name = "losses",
                       .label = "lm_head",
                       .shape = {t.tokens()},
                       .placement = Placement::whole,
                       .is_fp32 = true}});
}

}  // namespace llmc
