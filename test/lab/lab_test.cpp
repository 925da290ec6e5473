// How the lab checks an operation.
#include <memory>
#include <utility>
#include <vector>

#include "dev/lab/gpu.h"
#include "dev/lab/session.h"
#include "llmc/core/error.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

TEST(LabSession, RefusesToCheckNothing) {
    const lab::Operation operation{
        .name = "odd",
        .sizes = {"n"},
        .variants = {{1, "naive", {32}}, {2, "for tensor cores", {32}}},
        .checked = {{8}},
        .timed = {},
        .dtypes = {llmc::DType::fp32, llmc::DType::bf16},
        .takes = [](int, llmc::DType dtype, const auto&) { return dtype == llmc::DType::bf16; },
        .make = {}};
    lab::SessionOptions options;
    options.dtype = "fp32";
    options.variants = {2};
    EXPECT_THROW(lab::run_session(operation, options), llmc::UserError);
}

TEST(LabSession, ChecksEachShapeAtEachBlockSize) {
    using Checked = std::vector<std::pair<std::int64_t, int>>;
    struct Recording : lab::Problem {
        Recording(std::int64_t size, Checked& to) : n(size), runs(to) {}
        void run(int, int block_size, const LaunchContext&) override { runs.emplace_back(n, block_size); }
        void reset() override { ++resets; }
        void compare(lab::Comparison&) override { ++compared; }
        double bytes() const override { return 0; }
        ~Recording() override { EXPECT_TRUE(resets == 2 && compared == 2); }
        std::int64_t n;
        Checked& runs;
        int resets = 0, compared = 0;
    };
    Checked runs;
    const lab::Operation operation{.name = "odd",
                                   .sizes = {"n"},
                                   .variants = {{1, "naive", {32, 64}}},
                                   .checked = {{8}, {9}},
                                   .timed = {},
                                   .dtypes = {llmc::DType::fp32},
                                   .takes = {},
                                   .make = [&](auto, const lab::Shape& shape,
                                               auto&) { return std::make_unique<Recording>(shape[0], runs); },
                                   .checked_for_races = {{8}, {9}}};
    check_variant(operation, operation.variants[0], llmc::DType::fp32, lab::gpu_context(), 1);
    EXPECT_EQ(runs, (Checked{{8, 32}, {8, 64}, {9, 32}, {9, 64}}));
}

}  // namespace
}  // namespace kernel_test
