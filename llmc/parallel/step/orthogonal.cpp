#include "llmc/parallel/step/orthogonal.h"

#include <vector>

#include "llmc/device/counting_ops.h"
#include "llmc/optim/muon.h"

namespace llmc {

namespace {

// A block of a whole matrix that lies in a tensor-parallel rank's part of a tensor, in rows of its own.
struct MatrixBlock {
    std::int64_t own;                         // its first element in the part
    std::int64_t row, column, rows, columns;  // in the matrix
};

// The blocks of matrix `number` of a tensor. A run is whole rows, or a piece of one; pieces of consecutive rows make
// one block.
std::vector<MatrixBlock> blocks_of(const UnitLayout::Entry& entry, TensorRank ranks, int number) {
    const MatrixSizes sizes = matrix_sizes(entry.spec);
    const std::int64_t first = number * sizes.rows * sizes.columns, end = first + sizes.rows * sizes.columns;
    std::vector<MatrixBlock> blocks;
    for (const TensorRun& run : runs_of(entry, ranks)) {
        // A run of all rows of several matrices is cut.
        const std::int64_t begin = std::max(run.whole, first),
                           size = std::min(run.whole + run.size, end) - begin;
        if (size <= 0) continue;
        const std::int64_t row = (begin - first) / sizes.columns, column = (begin - first) % sizes.columns,
                           columns = std::min(size, sizes.columns);
        const bool continues = !blocks.empty() && columns < sizes.columns && blocks.back().column == column &&
                               blocks.back().columns == columns &&
                               blocks.back().row + blocks.back().rows == row;
        if (continues) {
            ++blocks.back().rows;
        } else {
            blocks.push_back({run.own + begin - run.whole, row, column, size / columns, columns});
        }
    }
    return blocks;
}

}  // namespace

void orthogonalise_matrix(Ops& ops, std::int64_t rows, std::int64_t columns,
                          const DirectionBuffers<Tensor>& buffers) {
    using K = MuonIteration;
    const std::int64_t elements = rows * columns, padded = MatrixSizes{rows, columns}.padded_elements();
    const Tensor X = buffers.matrix.flat(0, elements).view({rows, columns}),
                 BX = buffers.product.flat(0, elements).view({rows, columns}),
                 A = buffers.square.flat(0, rows * rows).view({rows, rows}),
                 B = buffers.squared.flat(0, rows * rows).view({rows, rows});
    if (padded > elements) ops.run(Fill{buffers.matrix.flat(elements, padded - elements), 0.0F});
    const Tensor partials = buffers.partials.flat(0, padded / norm_block_elements);
    ops.run(GlobalNormSquared{partials, buffers.matrix.flat(0, padded)});
    ops.run(Fill{buffers.norm, 0.0F});
    ops.run(Sum{buffers.norm, partials});
    ops.run(Combine{X, X, {}, 1, 0, buffers.norm});
    for (int step = 0; step < K::steps; ++step) {
        ops.run(MatmulForward{A, X, X});
        ops.run(MatmulForward{B, A, A});  // A is its own transpose
        ops.run(Combine{B, A, B, K::b, K::c});
        ops.run(MatmulBackward{.din = BX, .dweight = {}, .dbias = {}, .dout = B, .in = X, .weight = X});
        ops.run(Combine{X, X, BX, K::a, 1});
    }
}

std::vector<WorkspaceRequest> workspace_of_orthogonalise(const MatrixSizes& matrix, DType D) {
    const std::int64_t rows = matrix.fewer(), columns = matrix.more();
    const Tensor X{marked_address(1), D, {rows, columns}}, A{marked_address(2), D, {rows, rows}};
    return {
        MatmulForward{A, X, X}.workspace(), MatmulForward{A, A, A}.workspace(),
        MatmulBackward{.din = X, .dweight = {}, .dbias = {}, .dout = A, .in = X, .weight = X}.workspace()};
}

void orthogonalise(Ops& ops, const UnitLayout& unit, std::int64_t elements, const ElementRange& updated,
                   const std::function<bool(const ParamSpec&)>& is_updated,
                   const DirectionBuffers<Tensor>& buffers) {
    const TensorRank own = unit.ranks();
    for (const UnitLayout::Entry& entry : unit.entries()) {
        if (!is_updated(entry.spec)) continue;
        const MatrixSizes sizes = matrix_sizes(entry.spec);
        const bool is_divided = entry.spec.divided_dim(own.size).has_value();
        const std::int64_t local = entry.shape.elements() / entry.spec.matrices;
        for (int number = 0; number < entry.spec.matrices; ++number) {
            const std::int64_t begin = entry.offset + number * local;
            if (intersection({begin, begin + local}, updated).size() == 0) continue;
            // Copies the blocks of a rank into the matrix, which lies on its side if it is tall; or back.
            const auto copy = [&](int rank, bool is_back) {
                for (const MatrixBlock& block : blocks_of(entry, {rank, own.size}, number)) {
                    const Tensor part = buffers.directions.flat(rank * elements + entry.offset + block.own,
                                                                block.rows * block.columns);
                    const std::int64_t first = sizes.is_tall() ? block.column * sizes.rows + block.row
                                                               : block.row * sizes.columns + block.column;
                    const Tensor matrix = buffers.matrix.flat(first, sizes.rows * sizes.columns - first);
                    if (is_back) {
                        ops.run(CopyMatrix{part, matrix, sizes.is_tall() ? block.columns : block.rows,
                                           sizes.is_tall() ? block.rows : block.columns, block.columns,
                                           sizes.more(), sizes.is_tall()});
                    } else {
                        ops.run(CopyMatrix{matrix, part, block.rows, block.columns, sizes.more(),
                                           block.columns, sizes.is_tall()});
                    }
                }
            };
            for (int rank = 0; rank < own.size; ++rank)
                if (is_divided || rank == own.rank) copy(rank, false);
            orthogonalise_matrix(ops, sizes.fewer(), sizes.more(), buffers);
            copy(own.rank, true);
        }
    }
}

}  // namespace llmc
