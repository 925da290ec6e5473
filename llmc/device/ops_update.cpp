// The sizes, the work and the workspace of the operations in ops_update.h.
#include "llmc/device/ops_update.h"

#include <algorithm>

#include "llmc/device/eight_bit_state.h"
#include "llmc/device/op_checks.h"
#include "llmc/optim/formulas.h"

namespace llmc {

// ---- classifier

namespace {

// Only the first `columns` columns of the logits count.
RowSizes logits_sizes(const Tensor& logits, const Tensor& targets, std::int64_t columns,
                      const ClassifierTerms& terms) {
    check(logits.shape.dimensions() == 2, "logits are (N,Vp)");
    const RowSizes s{logits.shape[0], logits.shape[1]};
    check(columns >= 0 && columns <= s.channels, "the vocabulary lies inside the logits' columns");
    check_elements(targets, s.rows, "targets");
    check(terms.cap >= 0 && terms.z_loss >= 0, "the classifier's cap and z-loss are at least 0");
    return s;
}

}  // namespace

RowSizes FusedClassifier::sizes() const {
    check_operands(*this);
    check(vocabulary > 0, "the vocabulary is not empty");
    const RowSizes s = logits_sizes(logits, targets, vocabulary, terms);
    check_elements(losses, s.rows, "losses");
    return s;
}
RowSizes ClassifierStatistics::sizes() const {
    check_operands(*this);
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns, terms);
    check_shape(statistics, {s.rows, classifier_statistics_numbers}, "statistics");
    return s;
}
ClassifierSizes ClassifierFromStatistics::sizes() const {
    check_operands(*this);
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns, terms);
    check_elements(losses, s.rows, "losses");
    check(all_statistics.shape.dimensions() == 3 && all_statistics.shape[0] > 0, "statistics are (R,N,3)");
    const std::int64_t ranks = all_statistics.shape[0];
    check_shape(all_statistics, {ranks, s.rows, classifier_statistics_numbers}, "all_statistics");
    return {s.rows, s.channels, ranks};
}
std::int64_t SoftCap::sizes() const {
    check(cap > 0, "a cap is above 0");
    return same_elements(*this, in, {{&out, "out"}});
}

OpCost FusedClassifier::cost() const {
    return {.bytes = (write_dlogits ? 2 : 1) * moved(logits) + moved(losses) + moved(targets)};
}
OpCost ClassifierStatistics::cost() const { return elementwise(*this, 0); }
OpCost ClassifierFromStatistics::cost() const {
    return {.bytes = (write_dlogits ? 2 * moved(logits) : 0) + moved(losses) + moved(all_statistics) +
                     moved(targets)};
}
OpCost SoftCap::cost() const { return elementwise(*this, 0); }

// ---- norm and update

std::int64_t GlobalNormSquared::sizes() const {
    check_operands(*this);
    check(x.elements() % norm_block_elements == 0, "the norm takes whole blocks of norm_block_elements");
    check_elements(partials, x.elements() / norm_block_elements, "partials");
    return x.elements();
}
std::int64_t Sum::sizes() const {
    check_operands(*this);
    check_elements(out, 1, "out");
    return x.elements();
}

namespace {

void check_rounding(const StochasticRounding& rounding) {
    check(rounding.first_element % 4 == 0, "the buffer's first element has an index that is a multiple of 4");
}

void check_segments(std::span<const UpdateSegment> segments, std::int64_t elements) {
    std::int64_t previous_end = 0;
    for (const UpdateSegment& segment : segments) {
        check(segment.begin >= previous_end && segment.end >= segment.begin && segment.end <= elements,
              "segments are in increasing order inside the buffer");
        previous_end = segment.end;
    }
}

void check_state(const UpdateState& state, std::int64_t elements, std::span<const UpdateSegment> segments) {
    check_elements(state.values, elements, "state");
    if (state.values.dtype != DType::uint8) return;
    check(elements % eight_bit_block == 0, "state in 8 bits is whole blocks");
    check(!!state.amax, "state in 8 bits has the greatest magnitudes of its blocks");
    check_elements(state.amax, elements / eight_bit_block, "amax");
    const std::int64_t packed = state.packed ? state.packed.elements() : 0;
    for (const UpdateSegment& segment : segments)
        check(segment.in_packed <= packed - (segment.end - segment.begin) || segment.in_packed < 0,
              "a small tensor lies in the buffer of small ones");
}

}  // namespace

std::int64_t OptimizerUpdate::sizes() const {
    check_operands(*this);
    const std::int64_t n = parameters.elements();
    const DType X = parameters.dtype, kept = state.front().values.dtype;
    const bool has_master = master.dtype != X;
    check(!has_master || master.dtype == DType::fp32, "a master copy is in fp32");
    check(has_master || parameters.data == master.data,
          "without a master copy, the parameters take its place");
    check(has_master || X == DType::fp32 || rounding,
          "without a master copy, parameters are rounded at random");
    check(kept == DType::fp32 || kept == DType::bf16 || kept == DType::uint8,
          "state is in fp32, bf16 or 8 bits");
    check(gradients.dtype == DType::fp32 || gradients.dtype == DType::bf16 || gradients.dtype == X,
          "gradients are in fp32, bf16 or X");
    for (const auto& [x, which] : {std::pair{&master, "master"}, {&gradients, "gradients"}})
        check_elements(*x, n, which);
    check_elements(norm_squared, 1, "norm_squared");
    check_segments(segments, n);
    const auto states =
        static_cast<std::size_t>(with_formula(optimizer, []<class Formula>() { return Formula::states; }));
    for (std::size_t i = 0; i < most_states; ++i) {
        check(!!state[i].values == (i < states), "the optimizer has as many tensors of state");
        check(i >= states || state[i].values.dtype == kept, "all state is in one dtype");
        check_state(state[i], n, segments);
    }
    check(!rounding || X == DType::bf16, "stochastic rounding is to bf16");
    check(rounding_of_state.has_value() == (kept == DType::bf16), "state in bf16 is rounded at random");
    for (const auto& random : {rounding, rounding_of_state})
        if (random) check_rounding(*random);
    check(step.step >= 1, "an optimizer's steps count from 1");
    return n;
}

std::int64_t Momentum::sizes() const {
    check_operands(*this);
    const std::int64_t n = out.elements();
    check(state.dtype == DType::fp32 || state.dtype == DType::bf16, "momentum is in fp32 or bf16");
    check(gradients.dtype == DType::fp32 || gradients.dtype == DType::bf16, "gradients are in fp32 or bf16");
    for (const auto& [x, which] : {std::pair{&state, "state"}, {&gradients, "gradients"}})
        check_elements(*x, n, which);
    check_elements(norm_squared, 1, "norm_squared");
    check_segments(segments, n);
    check(rounding_of_state.has_value() == (state.dtype == DType::bf16),
          "state in bf16 is rounded at random");
    if (rounding_of_state) check_rounding(*rounding_of_state);
    return n;
}
std::int64_t CopyMatrix::sizes() const {
    check_operands(*this);
    const std::int64_t out_rows = transposed ? columns : rows, out_columns = transposed ? rows : columns;
    check(rows > 0 && columns > 0, "a matrix has rows and columns");
    check(in_stride >= columns && out_stride >= out_columns, "a row begins behind the row before");
    check(in.elements() >= (rows - 1) * in_stride + columns &&
              out.elements() >= (out_rows - 1) * out_stride + out_columns,
          "the buffers have room for the matrix");
    return rows * columns;
}
std::int64_t Combine::sizes() const {
    check_elements(norm_squared, 1, "norm_squared");
    return same_elements(*this, out, {{&x, "x"}, {&y, "y"}});
}

OpCost Momentum::cost() const { return elementwise(*this, 6 * elements_of(out)); }
OpCost CopyMatrix::cost() const {
    return {.bytes = 2.0 * static_cast<double>(rows * columns) * static_cast<double>(size_of(in.dtype))};
}
OpCost Combine::cost() const { return elementwise(*this, 3 * elements_of(out)); }

OpCost GlobalNormSquared::cost() const { return elementwise(*this, 2 * elements_of(x)); }
OpCost Sum::cost() const { return elementwise(*this, elements_of(x)); }
WorkspaceRequest Sum::workspace() const { return request(DType::fp32, RowSizes{1, 8}); }
OpCost OptimizerUpdate::cost() const {
    const bool has_master = master.data != parameters.data;
    double of_state = 0;
    for (const UpdateState& each : state) of_state += moved(each.values);
    return {
        .flops =
            with_formula(optimizer, []<class Formula>() { return Formula::flops; }) * elements_of(parameters),
        .bytes = (has_master ? moved(parameters) : 0) + 2 * (moved(master) + of_state) + moved(gradients)};
}
WorkspaceRequest OptimizerUpdate::workspace() const { return request(parameters.dtype, RowSizes{1, 8}); }

// ---- elementwise

std::int64_t Cast::sizes() const {
    const std::int64_t elements = same_elements(*this, in, {{&out, "out"}});
    check(is_compute_dtype(in.dtype) && is_compute_dtype(out.dtype), "a cast is between compute dtypes");
    return elements;
}
std::int64_t Copy::sizes() const {
    check(out.dtype == in.dtype, "a copy has the dtype of its source");
    return same_elements(*this, in, {{&out, "out"}});
}
std::int64_t Fill::sizes() const { return same_elements(*this, out, {}); }
std::int64_t Add::sizes() const { return same_elements(*this, out, {{&a, "a"}, {&b, "b"}}); }
std::int64_t Accumulate::sizes() const {
    check(out.dtype == DType::bf16, "sums that are rounded at random are in bf16");
    check(in.dtype == DType::bf16 || in.dtype == DType::fp32, "terms of a sum are in fp32 or bf16");
    check_rounding(rounding);
    return same_elements(*this, out, {{&in, "in"}});
}
std::int64_t AllFinite::sizes() const {
    check_operands(*this);
    check_elements(flag, 1, "flag");
    return x.elements();
}

OpCost Cast::cost() const { return elementwise(*this, 0); }
OpCost Copy::cost() const { return elementwise(*this, 0); }
OpCost Fill::cost() const { return elementwise(*this, 0); }
OpCost Add::cost() const { return elementwise(*this, elements_of(out)); }
OpCost Accumulate::cost() const { return elementwise(*this, elements_of(out)); }
OpCost AllFinite::cost() const { return elementwise(*this, 0); }

}  // namespace llmc
