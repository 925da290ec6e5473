// The parallel matrix of a strange family (test/strange_family.h).
#include <gtest/gtest.h>

#include "mpi_test.h"
#include "parallel_matrix.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

using test::Equals;
using test::TrainingSetting;

// Chunks of one stage add to the shared matrix's gradient, and other chunks are other stages'.
int order_of_sums(const TrainingSetting& setting) {
    return setting.schedule == PipelineSchedule::interleaved ? 1 : 0;
}

test::Matrix make_matrix() {
    static const Model model = strange::model();
    return {.plain = {.model = &model, .sequences = 16, .steps = 30, .reads = true},
            .meshes = {{1, 1, 1},
                       {1, 2, 1},
                       {2, 1, 1},
                       {2, 2, 1},
                       {3, 1, 1},
                       {4, 1, 1},
                       {4, 2, 1},
                       {1, 4, 1, false, 2},
                       {1, 1, 2},
                       {1, 1, 2, true},
                       {1, 2, 2},
                       {1, 2, 2, true},
                       {2, 1, 2},
                       {2, 1, 2, true},
                       {2, 2, 2},
                       {2, 2, 2, true},
                       {2, 4, 1, false, 2},
                       {4, 1, 2},
                       {4, 1, 2, true}},
            .order_of_sums = order_of_sums};
}
const test::Matrix& matrix() {
    static const test::Matrix made = make_matrix();
    return made;
}
bool none(const TrainingSetting&) { return false; }

TEST(StrangeFamily, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix(whole_matrix(matrix()), none)) {
        if (fits_here(settings)) expect_one_run(matrix(), settings);
    }
}

class StrangeWholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(StrangeWholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "takes other ranks";
    expect_one_run(matrix(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, StrangeWholeMatrix, testing::ValuesIn(whole_matrix(matrix())),
                         [](const auto& run) { return name_of_run(run.param); });

}  // namespace
}  // namespace llmc
