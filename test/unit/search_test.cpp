// The search of meshes.
#include "llmc/planner/best_meshes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace llmc {
namespace {

PlannedRun read_plan(const std::string& options) {
    PlannedRun run;
    std::string text;
    EXPECT_TRUE(read(run, with_options({"./train_gpt", "--search"}, options), text));
    return run;
}

std::vector<std::string> best_options(const PlannedRun& run) {
    std::vector<std::string> options;
    ModelTimes passes;
    for (const Found& found : best_meshes(run, passes).best) options.push_back(found.options);
    return options;
}

const std::string model =
    "--model llama-mini --layers 4 --heads 8 --kv-heads 4 --channels 1024 --mlp-size 4096 --seq-len 1024 "
    "--gpus 64 --global-batch-tokens 65536 ";

// On 64 GPUs, whose memory holds few of the meshes, all, with slow links, and with state in the host's memory and on a
// disk.
TEST(Search, EqualsTheExhaustiveOne) {
    for (const char* const options :
         {"--gpu-memory 1.6 --reserve 1", "--gpu 4090 --network 3 --recompute none",
          "--gpus 8 --offload-optimizer cpu", "--gpus 8 --offload-parameters cpu --recompute block",
          "--gpus 8 --offload-optimizer nvme --offload-parameters nvme --nvme-dir D"}) {
        const PlannedRun run = read_plan(model + options);
        ModelTimes passes;
        const Search bounded = best_meshes(run, passes),
                     all = best_meshes(run, passes, {}, Fixed::given, /*uses_bounds*/ false);
        EXPECT_EQ(bounded.considered, all.considered);
        EXPECT_LT(bounded.simulated, all.simulated) << options;
        ASSERT_EQ(bounded.best.size(), all.best.size()) << options;
        for (std::size_t i = 0; i < all.best.size(); ++i)
            EXPECT_EQ(bounded.best[i].options, all.best[i].options) << options << " place " << i;
    }
}

// The bound of memory counts no state whole that a stage shards: a mesh is found where there is just the memory that it
// needs.
TEST(Search, FindsWhatJustFits) {
    const std::string mesh =
        model + "--tensor-parallel 1 --pipeline-parallel 1 --micro-batch-size 1 --recompute none";
    for (int stage = 0; stage <= 3; ++stage) {
        for (const char* const moments : {"fp32", "8bit"}) {
            const std::string options = fmt::format("{} --zero-stage {} --moments-dtype {}{}", mesh, stage,
                                                    moments, stage > 0 ? " --zero-shard-size 64" : "");
            ModelTimes passes;
            const Search ample = best_meshes(read_plan(options), passes);
            ASSERT_EQ(ample.best.size(), 1U) << options;
            const double beside_it = 2.001;  // GiB
            const double memory = static_cast<double>(ample.best.front().bytes) / 0x1p30 + beside_it;
            EXPECT_EQ(best_meshes(read_plan(fmt::format("{} --gpu-memory {:.4f}", options, memory)), passes)
                          .best.size(),
                      1U)
                << options;
        }
    }
}

TEST(Search, GivenOptionsStayFixed) {
    const std::vector<std::string> found = best_options(
        read_plan("--model gpt2 --gpus 16 --zero-stage 2 --pipeline-parallel 2 --micro-batch-size 4"));
    ASSERT_FALSE(found.empty());
    for (const std::string& options : found) {
        for (const char* given : {"zero-stage", "pipeline-parallel", "micro-batch-size"})
            EXPECT_EQ(options.find(given), std::string::npos) << options;
    }
}

}  // namespace
}  // namespace llmc
