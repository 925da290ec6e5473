// Boxes of tensors: those of any run of a rank's part have its elements in order, and the boxes that all ranks of a
// mesh write have each element of the model once.
#include "llmc/io/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/model/family.h"
#include "llmc/model/model.h"

namespace llmc {
namespace {

// The numbers of a box's elements in a tensor with these columns, row by row.
std::vector<std::int64_t> numbers_in(const Box& box, std::int64_t columns) {
    std::vector<std::int64_t> numbers;
    for (std::int64_t row = box.row; row < box.end_row(); ++row)
        for (std::int64_t column = box.column; column < box.end_column(); ++column)
            numbers.push_back(row * columns + column);
    return numbers;
}

std::vector<std::int64_t> numbers_in(const std::vector<Box>& boxes, std::int64_t columns) {
    std::vector<std::int64_t> numbers;
    for (const Box& box : boxes) {
        const std::vector<std::int64_t> more = numbers_in(box, columns);
        numbers.insert(numbers.end(), more.begin(), more.end());
    }
    return numbers;
}

TEST(Boxes, OfEachRunAreAtMostThreeAndHaveItsElementsInOrder) {
    for (std::int64_t columns = 1; columns <= 5; ++columns) {
        for (std::int64_t begin = 0; begin < 4 * columns; ++begin) {
            for (std::int64_t end = begin; end <= 4 * columns; ++end) {
                const std::vector<Box> boxes = boxes_of_run(columns, {begin, end});
                EXPECT_LE(boxes.size(), 3u);
                std::vector<std::int64_t> expected;
                for (std::int64_t i = begin; i < end; ++i) expected.push_back(i);
                EXPECT_EQ(numbers_in(boxes, columns), expected);
            }
        }
    }
}

TEST(Boxes, IntersectInWhatBothHave) {
    const Box a{1, 2, 3, 4};
    EXPECT_EQ(intersection(a, {0, 0, 10, 10}), a);
    EXPECT_EQ(intersection(a, {2, 0, 10, 3}), (Box{2, 2, 2, 1}));
    EXPECT_EQ(intersection(a, {4, 2, 1, 4}).elements(), 0);
    EXPECT_EQ(intersection(a, {0, 6, 9, 1}).elements(), 0);
}

// The numbers of a part's elements in the whole tensor, by the runs that initial weights and exports use.
std::vector<std::int64_t> numbers_of_part(const UnitLayout::Entry& entry, TensorRank ranks) {
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(entry.shape.elements()));
    for (const TensorRun& run : runs_of(entry, ranks))
        for (std::int64_t i = 0; i < run.size; ++i)
            numbers[static_cast<std::size_t>(run.own + i)] = run.whole + i;
    return numbers;
}

struct DividedTensor {
    ParamSpec spec;
    std::size_t most_boxes;
};

TEST(Boxes, OfEachRunOfAPartHaveItsElements) {
    const auto spec = [](const Shape& shape, std::optional<int> dim, bool is_vector = false,
                         std::int64_t multiple = 1) {
        ParamSpec made;
        made.name = "x";
        made.shape = shape;
        made.tensor_dim = dim;
        made.row_multiple = multiple;
        made.is_vector = is_vector;
        return made;
    };
    const std::vector<DividedTensor> tensors = {
        {spec({6, 5}, 0), 3},       {spec({5, 6}, 1), 3},          {spec({5, 3}, {}), 3},
        {spec({3, 6, 2, 4}, 1), 5}, {spec({6, 2, 3}, 0), 3},       {spec({7, 3}, 0, false, 2), 3},
        {spec({12}, 0, true), 1},   {spec({3, 6, 2}, 1, true), 3}, {spec({5}, {}, true), 1}};
    for (const auto& [tensor, most_boxes] : tensors) {
        for (const int size : {1, 2, 3}) {
            for (int rank = 0; rank < size; ++rank) {
                const UnitLayout unit({"u", {tensor}}, {rank, size});
                const UnitLayout::Entry& entry = unit.entries().front();
                const TensorPart part(entry, {rank, size});
                const std::vector<std::int64_t> all = numbers_of_part(entry, {rank, size});
                const std::int64_t columns = whole_box(tensor).columns;
                ASSERT_EQ(part.elements(), std::ssize(all));
                for (std::int64_t begin = 0; begin <= std::ssize(all); ++begin) {
                    for (std::int64_t end = begin; end <= std::ssize(all); ++end) {
                        const std::vector<Box> boxes = part.boxes({begin, end});
                        EXPECT_LE(boxes.size(), size == 1 ? 3 : most_boxes);
                        EXPECT_EQ(numbers_in(boxes, columns),
                                  std::vector(all.begin() + begin, all.begin() + end))
                            << to_string(tensor.shape) << ", rank " << rank << " of " << size;
                    }
                }
                for (std::size_t i = 0; i < all.size(); ++i)
                    EXPECT_EQ(part.number(all[i] / columns, all[i] % columns), static_cast<std::int64_t>(i));
            }
        }
    }
}

// A layer for each stage, or all three.
std::vector<BlockRange> blocks_of(int stages) {
    if (stages == 1) return {{0, 3}};
    if (stages == 2) return {{0, 1}, {1, 3}};
    return {{0, 1}, {1, 2}, {2, 3}};
}

struct TriedMesh {
    int pipeline, tensor, stage, shards, replicas;
};
class WrittenBoxes : public testing::TestWithParam<TriedMesh> {};

TEST_P(WrittenBoxes, HaveEachElementOnceInSharesOfOneSize) {
    for (const char* name : {"tiny", "llama-tiny"}) {
        ModelChoices choices = choices_of(name);
        choices.values.find("layers")->second = std::int64_t{3};
        choices.values.find("vocab-size")->second = std::int64_t{257};
        const Model model = make_model(family_of(name), choices);
        const auto outline = std::make_shared<const Outline>(outline_of(model));
        const TriedMesh& tried = GetParam();
        Mesh mesh{.pipeline = tried.pipeline,
                  .tensor = tried.tensor,
                  .sharding = {.stage = tried.stage, .shards = tried.shards, .replicas = tried.replicas}};
        const std::vector<StagePart> parts =
            parts_of_stages(outline, blocks_of(tried.pipeline), tried.pipeline, false, {});
        const ModelPlaces places(mesh, parts);
        std::vector<std::int64_t> of_rank(static_cast<std::size_t>(mesh.world()));
        std::int64_t all = 0, largest_tensor = 0;
        for (int unit = 0; unit < places.units(); ++unit) {
            for (std::size_t entry = 0; entry < places.tensors(unit); ++entry) {
                const Box whole = whole_box(places.spec(unit, entry));
                std::vector<int> times(static_cast<std::size_t>(whole.elements()));
                for (int rank = 0; rank < mesh.world(); ++rank) {
                    const ElementRange written = places.written(unit, entry, rank);
                    const TensorPart part = places.part(unit, entry, rank % mesh.tensor);
                    for (const std::int64_t number : numbers_in(part.boxes(written), whole.columns))
                        ++times[static_cast<std::size_t>(number)];
                    of_rank[static_cast<std::size_t>(rank)] += written.size();
                    EXPECT_EQ(intersection(written, places.kept(unit, entry, rank)).size(), written.size());
                }
                EXPECT_TRUE(std::ranges::all_of(times, [](int count) { return count == 1; }))
                    << name << ": " << places.layout(unit, 0).full_name(places.spec(unit, entry));
                all += whole.elements();
                largest_tensor = std::max(largest_tensor, whole.elements());
            }
        }
        // Stages and shards have different sizes, and so have parts of a table, but ranks with equal elements share
        // them.
        if (mesh.pipeline == 1 && mesh.tensor == 1 && tried.stage == 0) {
            EXPECT_LE(std::ranges::max(of_rank), all / mesh.world() + largest_tensor / mesh.world() + 4096);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Meshes, WrittenBoxes,
                         testing::Values(TriedMesh{1, 1, 0, 1, 1}, TriedMesh{1, 1, 0, 3, 1},
                                         TriedMesh{1, 1, 1, 3, 1}, TriedMesh{1, 1, 3, 2, 2},
                                         TriedMesh{1, 2, 0, 1, 1}, TriedMesh{1, 2, 2, 3, 1},
                                         TriedMesh{3, 1, 0, 2, 1}, TriedMesh{3, 2, 1, 2, 1},
                                         TriedMesh{2, 2, 3, 2, 2}));

}  // namespace
}  // namespace llmc
