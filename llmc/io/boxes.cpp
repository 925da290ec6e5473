#include "llmc/io/boxes.h"

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/parallel/zero/checkpoint_share.h"

namespace llmc {

Box intersection(const Box& a, const Box& b) {
    const std::int64_t row = std::max(a.row, b.row), column = std::max(a.column, b.column);
    return {row, column, std::max<std::int64_t>(0, std::min(a.end_row(), b.end_row()) - row),
            std::max<std::int64_t>(0, std::min(a.end_column(), b.end_column()) - column)};
}

Box whole_box(const ParamSpec& spec) {
    const std::int64_t columns = spec.is_vector ? 1 : spec.shape.last();
    return {0, 0, spec.shape.elements() / columns, columns};
}

Shape file_shape(const ParamSpec& spec) {
    const Box whole = box_in_file(spec, whole_box(spec));
    return spec.is_vector ? Shape{whole.rows} : Shape{whole.rows, whole.columns};
}

Box box_in_file(const ParamSpec& spec, const Box& box) {
    return spec.transposed_in_files ? box.transposed() : box;
}

std::vector<Box> boxes_of_run(std::int64_t columns, const ElementRange& run) {
    std::vector<Box> boxes;
    std::int64_t next = run.begin;
    while (next < run.end) {
        const std::int64_t row = next / columns, column = next % columns;
        const bool is_whole = column == 0 && run.end - next >= columns;
        const Box box = is_whole ? Box{row, 0, (run.end - next) / columns, columns}
                                 : Box{row, column, 1, std::min(columns - column, run.end - next)};
        boxes.push_back(box);
        next += box.elements();
    }
    return boxes;
}

TensorPart::TensorPart(const UnitLayout::Entry& entry, TensorRank ranks) {
    const Shape &own = entry.shape, &whole = entry.spec.shape;
    const std::optional<int> divided = entry.spec.divided_dim(ranks.size);
    const int last = own.dimensions() - 1;
    columns_ = entry.spec.is_vector ? 1 : own.last();
    rows_ = columns_ > 0 ? own.elements() / columns_ : 0;
    block_rows_ = distance_ = std::max<std::int64_t>(rows_, 1);
    if (!divided || own[*divided] == whole[*divided]) return;
    if (*divided == last && !entry.spec.is_vector) {
        first_column_ = ranks.rank * entry.stored.last();
        return;
    }
    std::int64_t inner = 1;  // rows of an entry of the divided dimension
    for (int i = *divided + 1; i <= last; ++i) inner *= i == last && !entry.spec.is_vector ? 1 : own[i];
    block_rows_ = std::max<std::int64_t>(own[*divided] * inner, 1);
    distance_ = whole[*divided] * inner;
    first_row_ = ranks.rank * entry.stored[*divided] * inner;
}

std::vector<Box> TensorPart::boxes(const ElementRange& run) const {
    std::vector<Box> boxes;
    for (const Box& own : boxes_of_run(columns_, run)) {
        for (std::int64_t row = own.row; row < own.end_row();) {
            const std::int64_t block = row / block_rows_,
                               end = std::min(own.end_row(), (block + 1) * block_rows_);
            boxes.push_back({first_row_ + block * distance_ + row % block_rows_, first_column_ + own.column,
                             end - row, own.columns});
            row = end;
        }
    }
    return boxes;
}

std::int64_t TensorPart::number(std::int64_t row, std::int64_t column) const {
    const std::int64_t from_first = row - first_row_;
    const std::int64_t own_row = from_first / distance_ * block_rows_ + from_first % distance_;
    return own_row * columns_ + column - first_column_;
}

ModelPlaces::ModelPlaces(const Mesh& mesh, std::span<const StagePart> parts) : mesh_(mesh), parts_(parts) {
    for (int rank = 0; rank < mesh.tensor; ++rank) {
        auto& units = layouts_.emplace_back();
        for (const Outline::OutlinedUnit& unit : outline().units)
            units.emplace_back(unit.spec, TensorRank{rank, mesh.tensor});
    }
}

Mesh ModelPlaces::at(int rank) const {
    Mesh there = mesh_;
    there.rank = rank;
    return there;
}

TensorPart ModelPlaces::part(int unit, std::size_t entry, int tensor_rank) const {
    return {layout(unit, tensor_rank).entries()[entry], {tensor_rank, mesh_.tensor}};
}

ElementRange ModelPlaces::updated(int unit, int rank) const {
    const Mesh there = at(rank);
    if (!parts_[static_cast<std::size_t>(there.stage())].has_unit(unit)) return {};
    const Sharding& sharding = mesh_.sharding;
    const std::int64_t all = layout(unit, 0).padded_elements(sharding.ranks());
    if (sharding.keeps_optimizer_whole()) return {0, all};
    const std::int64_t size = all / sharding.shards;
    return {there.shard() * size, (there.shard() + 1) * size};
}

ElementRange ModelPlaces::kept(int unit, std::size_t entry, int rank) const {
    const UnitLayout::Entry& tensor = layout(unit, at(rank).tensor_rank()).entries()[entry];
    const ElementRange both =
        intersection(updated(unit, rank), {tensor.offset, tensor.offset + tensor.shape.elements()});
    return both.size() == 0 ? ElementRange{}
                            : ElementRange{both.begin - tensor.offset, both.end - tensor.offset};
}

ElementRange ModelPlaces::written(int unit, std::size_t entry, int rank) const {
    const ElementRange all = kept(unit, entry, rank);
    if (all.size() == 0) return {};
    const Mesh there = at(rank);
    const std::int64_t first = layout(unit, there.tensor_rank()).entries()[entry].offset;
    const ElementRange share = writers_of(there, parts_, unit).share(updated(unit, rank)),
                       part = intersection({all.begin + first, all.end + first}, share);
    if (part.size() == 0) return {};
    const ElementRange own{part.begin - first, part.end - first};
    if (spec(unit, entry).divided_dim(mesh_.tensor)) return own;
    return Writers{mesh_.tensor, there.tensor_rank()}.share(own);
}

}  // namespace llmc
