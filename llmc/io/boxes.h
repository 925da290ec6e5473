// Boxes: rectangular parts of tensors. A rank of a mesh has a range of a unit's flat buffer, which is a few boxes of
// each tensor. Sharded checkpoints and PyTorch's distributed checkpoints hold a tensor as boxes with their places.
//
// A tensor is a matrix here, in the program's orientation; a vector has one column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/model/units.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/pipeline/stage.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

struct Box {
    std::int64_t row = 0, column = 0, rows = 0, columns = 0;

    std::int64_t elements() const { return rows * columns; }
    std::int64_t end_row() const { return row + rows; }
    std::int64_t end_column() const { return column + columns; }
    Box transposed() const { return {column, row, columns, rows}; }
    bool operator==(const Box&) const = default;
};
Box intersection(const Box& a, const Box& b);

// The whole tensor.
Box whole_box(const ParamSpec& spec);
// Its shape in files, and a box of it there. A file may have the transpose.
Shape file_shape(const ParamSpec& spec);
Box box_in_file(const ParamSpec& spec, const Box& box);

// A run of a matrix's elements, row by row, as boxes: the end of a row, whole rows, the beginning of a row.
std::vector<Box> boxes_of_run(std::int64_t columns, const ElementRange& run);

// A tensor-parallel rank's part of a tensor: a matrix of whole or shortened rows, in blocks that follow each other in
// the whole at equal distances.
class TensorPart {
  public:
    TensorPart(const UnitLayout::Entry& entry, TensorRank ranks);

    std::int64_t elements() const { return rows_ * columns_; }
    std::int64_t columns() const { return columns_; }
    // A run of its elements as boxes of the whole tensor, which have the elements in this order: at most 3, and one
    // more for each block after the first.
    std::vector<Box> boxes(const ElementRange& run) const;
    // The number in the part of an element of the whole tensor that it has.
    std::int64_t number(std::int64_t row, std::int64_t column) const;

  private:
    std::int64_t rows_, columns_, first_column_ = 0;
    std::int64_t block_rows_, first_row_ = 0, distance_;
};

// Where the ranks of a mesh have the model's tensors.
class ModelPlaces {
  public:
    // `parts` is each stage's part of the model; they outlive the object.
    ModelPlaces(const Mesh& mesh, std::span<const StagePart> parts);

    const Mesh& mesh() const { return mesh_; }
    const Outline& outline() const { return *parts_.front().outline; }
    int units() const { return static_cast<int>(layouts_.front().size()); }
    const UnitLayout& layout(int unit, int tensor_rank) const {
        return layouts_[static_cast<std::size_t>(tensor_rank)][static_cast<std::size_t>(unit)];
    }
    const ParamSpec& spec(int unit, std::size_t entry) const { return layout(unit, 0).entries()[entry].spec; }
    std::size_t tensors(int unit) const { return layout(unit, 0).entries().size(); }
    TensorPart part(int unit, std::size_t entry, int tensor_rank) const;

    // The elements of a unit's flat buffer that a rank updates, and those of a tensor among them, which are a run of
    // its part. Empty if the rank's stage does not have the unit.
    ElementRange updated(int unit, int rank) const;
    ElementRange kept(int unit, std::size_t entry, int rank) const;
    // Those of kept() that this rank writes to a checkpoint, so that each element of the model is written once: its
    // share of the unit (checkpoint_share.h), of which tensor-parallel ranks divide what they all have.
    ElementRange written(int unit, std::size_t entry, int rank) const;

  private:
    Mesh at(int rank) const;

    Mesh mesh_;
    std::span<const StagePart> parts_;
    std::vector<std::vector<UnitLayout>> layouts_;  // by tensor-parallel rank and unit
};

}  // namespace llmc
