// Muon's iteration (optim/muon.h): makes the directions of matrices orthogonal, each as a whole, on the device.
#pragma once

#include <functional>
#include <vector>

#include "llmc/device/ops.h"
#include "llmc/model/units.h"
#include "llmc/parallel/zero/store_layout.h"

namespace llmc {

// X = U V^T, about, of X = U S V^T: X/|X|, and five times X = a X + (b A + c A A) X with A = X X^T. X is `matrix`, with
// no more rows than columns. Each of its numbers is rounded to D after each operation.
void orthogonalise_matrix(Ops& ops, std::int64_t rows, std::int64_t columns,
                          const DirectionBuffers<Tensor>& buffers);

// The workspaces that it asks for.
std::vector<WorkspaceRequest> workspace_of_orthogonalise(const MatrixSizes& matrix, DType D);

// Replaces the gathered directions of a unit's matrices of which this rank updates some elements: in its own part of
// the directions, which has `elements` for each tensor-parallel rank. `is_updated` tells the tensors that are updated
// as whole matrices.
void orthogonalise(Ops& ops, const UnitLayout& unit, std::int64_t elements, const ElementRange& updated,
                   const std::function<bool(const ParamSpec&)>& is_updated,
                   const DirectionBuffers<Tensor>& buffers);

}  // namespace llmc
