#include "llmc/io/boxes.h"

#include <algorithm>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// A rank writes no fewer elements of a tensor than this, if it writes any: each box has an entry in a file's header.
constexpr std::int64_t least_share = 1024;

}  // namespace

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
    const Mesh there = at(rank);
    const ElementRange all = kept(unit, entry, rank);
    if (all.size() == 0) return {};
    const Sharding& sharding = mesh_.sharding;
    // This rank's number among those that have the same elements: by stage, data-parallel and tensor-parallel rank.
    std::int64_t number = 0, stages = 0;
    for (int stage = 0; stage < mesh_.pipeline; ++stage) {
        if (!parts_[static_cast<std::size_t>(stage)].has_unit(unit)) continue;
        if (stage < there.stage()) ++number;
        ++stages;
    }
    const bool is_whole = sharding.keeps_optimizer_whole();
    const std::int64_t copies = is_whole ? sharding.ranks() : sharding.replicas,
                       copy = is_whole ? there.data_rank() : there.data_rank() / sharding.shards;
    const ParamSpec& tensor = spec(unit, entry);
    const std::int64_t alike = tensor.divided_dim(mesh_.tensor) ? 1 : mesh_.tensor,
                       alike_number = tensor.divided_dim(mesh_.tensor) ? 0 : there.tensor_rank();
    number = (number * copies + copy) * alike + alike_number;
    const std::int64_t writers = stages * copies * alike;
    // They take turns with small tensors.
    const std::int64_t shares = std::clamp<std::int64_t>(all.size() / least_share, 1, writers);
    const std::int64_t share = (number + static_cast<std::int64_t>(entry) * shares) % writers;
    if (share >= shares) return {};
    const std::int64_t columns = part(unit, entry, there.tensor_rank()).columns(),
                       grain = all.size() / columns >= shares ? columns : 1;
    const auto cut = [&](std::int64_t k) {
        if (k == shares) return all.end;
        const std::int64_t place = all.begin + all.size() * k / shares;
        return std::max(all.begin, place / grain * grain);
    };
    return {cut(share), cut(share + 1)};
}

}  // namespace llmc
