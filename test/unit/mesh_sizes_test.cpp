// Meshes that do not fit: the message advises everything that would fit, and nothing else.
#include "llmc/parallel/mesh.h"

#include <gtest/gtest.h>

#include <string>

#include "llmc/core/error.h"
#include "test/gpt2_config.h"

namespace llmc {
namespace {

constexpr GPTConfig tiny{.layers = 4, .heads = 4, .channels = 128, .sequence_length = 64, .vocabulary = 256};

std::string refusal(const MeshSizes& sizes, const GPTConfig& config = tiny) {
    try {
        check_mesh_sizes(sizes, gpt2(config));
        return "";
    } catch (const UserError& fault) {
        return fault.what();
    }
}

TEST(MeshSizes, AdviceFitsProcessesHeadsAndLayersAtOnce) {
    EXPECT_EQ(refusal({.processes = 6, .pipeline = 2, .tensor = 2}),
              "--tensor-parallel 2 does not divide the 3 processes of each stage; try 1, or "
              "--pipeline-parallel 3 --tensor-parallel 2");
    EXPECT_EQ(refusal({.processes = 6, .pipeline = 2, .tensor = 3}),
              "--tensor-parallel 3 does not divide the 4 heads (--heads); try 1, or --pipeline-parallel 3 "
              "--tensor-parallel 2");
    EXPECT_EQ(refusal({.processes = 8, .pipeline = 2, .tensor = 3}),
              "--tensor-parallel 3 does not divide the 4 heads (--heads); try 1, 2, 4");
    EXPECT_EQ(refusal({.processes = 6, .pipeline = 4}),
              "--pipeline-parallel 4 does not divide the 6 processes; try 1, 2, 3");
    EXPECT_EQ(refusal({.processes = 6, .pipeline = 6}),
              "--pipeline-parallel 6 needs a layer for each stage, but --layers is 4; try 1, 2, 3");
    EXPECT_EQ(refusal({.processes = 8, .pipeline = 3, .tensor = 2}),
              "--pipeline-parallel 3 does not divide the 8 processes; try 1, 2, 4");
    // Each stage has two chunks.
    EXPECT_EQ(refusal({.processes = 8, .pipeline = 3, .virtual_stages = 2}),
              "--pipeline-parallel 3 does not divide the 8 processes; try 1, 2");
    // No number of stages works with this number of tensor-parallel ranks.
    EXPECT_EQ(refusal({.processes = 9, .pipeline = 4, .tensor = 2}),
              "--pipeline-parallel 4 does not divide the 9 processes; try --pipeline-parallel 3 "
              "--tensor-parallel 1");
    GPTConfig odd = tiny;
    odd.sequence_length = 6;
    EXPECT_EQ(refusal({.processes = 4, .tensor = 3, .sequence_parallel = true}, odd),
              "--tensor-parallel 3 does not divide the 4 heads (--heads); try 1, 2");
    EXPECT_EQ(refusal({.processes = 4, .tensor = 4, .sequence_parallel = true}, odd),
              "--sequence-parallel: --tensor-parallel 4 does not divide --seq-len 6; try 4 or 8");
}

TEST(MeshSizes, AdviceDividesTheBatchWhereAnythingDoes) {
    EXPECT_EQ(refusal({.processes = 8, .pipeline = 3, .batch_sequences = 4}),
              "--pipeline-parallel 3 does not divide the 8 processes; try 2, 4");
    EXPECT_EQ(refusal({.processes = 8, .pipeline = 3, .batch_sequences = 1}),
              "--pipeline-parallel 3 does not divide the 8 processes; try --pipeline-parallel 4 "
              "--tensor-parallel 2");
    EXPECT_EQ(refusal({.processes = 6, .pipeline = 4, .batch_sequences = 1}),
              "--pipeline-parallel 4 does not divide the 6 processes; try --pipeline-parallel 3 "
              "--tensor-parallel 2");
    EXPECT_EQ(refusal({.processes = 7, .pipeline = 2, .batch_sequences = 4}),
              "--pipeline-parallel 2 does not divide the 7 processes; try --pipeline-parallel 1");
}

TEST(MeshSizes, TooFewProcessesAreToldHowManyToStart) {
    EXPECT_EQ(refusal({.processes = 1, .tensor = 2}),
              "--tensor-parallel 2 needs at least 2 processes; 1 is running; start 2 (--processes 2), or "
              "try --tensor-parallel 1");
    EXPECT_EQ(refusal({.processes = 1, .pipeline = 4}),
              "--pipeline-parallel 4 needs at least 4 processes; 1 is running; start 4 (--processes 4), or "
              "try --pipeline-parallel 1");
    // --tensor-parallel 3 is not advised: three ranks cannot share four heads equally.
    EXPECT_EQ(refusal({.processes = 3, .tensor = 4}),
              "--tensor-parallel 4 needs at least 4 processes; 3 are running; start 4 (--processes 4), or "
              "try --tensor-parallel 1");
    EXPECT_EQ(
        refusal({.processes = 2, .pipeline = 2, .tensor = 2}),
        "--pipeline-parallel 2 x --tensor-parallel 2 needs at least 4 processes; 2 are running; start 4 "
        "(--processes 4), or try --pipeline-parallel 1 --tensor-parallel 2");
}

TEST(MeshSizes, OfAnyNumberOfProcesses) {
    EXPECT_EQ(refusal({.pipeline = 6}),
              "--pipeline-parallel 6 needs a layer for each stage, but --layers is 4; give at most 4 stages");
    EXPECT_EQ(refusal({.pipeline = 3, .tensor = 3}),
              "--tensor-parallel 3 does not divide the 4 heads (--heads); try 1, 2, 4");
    GPTConfig absurd = tiny;
    absurd.heads = absurd.channels = std::int64_t{1} << 60;
    EXPECT_NE(refusal({.tensor = 3}, absurd).find("1, 2, 4, 8,"), std::string::npos);
}

// If a refusal advises a mesh by its options, that mesh must fit.
void expect_advice_fits(MeshSizes sizes) {
    const std::string text = refusal(sizes), start = text.substr(0, text.find(';') + 1);
    const auto named = [&](const std::string& option, std::int64_t& size) {
        const auto found = text.find(option, start.size());
        if (found != std::string::npos) size = std::stoll(text.substr(found + option.size()));
        return found != std::string::npos;
    };
    const bool stages = named("--pipeline-parallel ", sizes.pipeline),
               ranks = named("--tensor-parallel ", sizes.tensor);
    if (stages || ranks) {
        EXPECT_TRUE(fits(sizes, gpt2(tiny))) << text;
    }
}

// A refusal never advises a mesh that is refused, and a mesh that fits is not refused.
TEST(MeshSizes, ThatFitAreNotRefused) {
    for (int processes = 1; processes <= 12; ++processes)
        for (int pipeline = 1; pipeline <= 6; ++pipeline)
            for (int tensor = 1; tensor <= 6; ++tensor) {
                const MeshSizes sizes{.processes = processes, .pipeline = pipeline, .tensor = tensor};
                EXPECT_EQ(refusal(sizes).empty(), fits(sizes, gpt2(tiny)));
                expect_advice_fits(sizes);
                EXPECT_EQ(fits(sizes, gpt2(tiny)),
                          processes % (pipeline * tensor) == 0 && pipeline <= 4 && 4 % tensor == 0);
            }
}

}  // namespace
}  // namespace llmc
