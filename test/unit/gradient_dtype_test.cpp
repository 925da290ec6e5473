// Gradients in bf16, and bf16 parameters by stochastic rounding: where the buffers lie, and the bits that a
// step of a whole model leaves in them.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "llmc/device/stochastic_rounding.h"
#include "test/gpt2_units.h"
#include "test/probe/run_model.h"
#include "test/unit/reference_model.h"

namespace llmc {
namespace {

constexpr GPTConfig config{.layers = 3, .heads = 2, .channels = 20, .sequence_length = 10, .vocabulary = 37};

std::size_t padded_bytes(std::int64_t elements, std::size_t each) {
    return (static_cast<std::size_t>(elements) * each + buffer_alignment - 1) / buffer_alignment *
           buffer_alignment;
}

TEST(GradientDtype, IsTwoBytesAParameterAndTheSumsOfFourUnits) {
    for (const int ranks : {1, 3}) {
        MemoryLayout memory;
        const StoreLayout store = lay_out_store(memory, {DType::bf16, DType::bf16},
                                                whole_model(outline_of(config)), {.shards = ranks}, 1);
        std::size_t expected = 0;
        for (const UnitLayout& unit : store.units) expected += padded_bytes(unit.padded_elements(ranks), 2);
        for (const int unit : {wte_unit, wpe_unit, block_unit(0), ln_f_unit(3)}) {
            expected += padded_bytes(store.units[static_cast<std::size_t>(unit)].padded_elements(ranks), 4);
        }
        EXPECT_EQ(memory.bytes(ArenaKind::gradients), expected);
        std::set<int> sums;
        for (const auto& buffers : store.buffers) {
            EXPECT_NE(buffers.gradient_sums.index, buffers.gradients.index);
            sums.insert(buffers.gradient_sums.index);
        }
        EXPECT_EQ(sums.size(), 4U);
        EXPECT_EQ(store.buffers[2].gradient_sums.index, store.buffers[4].gradient_sums.index);
    }
}

TEST(GradientDtype, InFp32NeedsNoMore) {
    MemoryLayout memory;
    const StoreLayout store =
        lay_out_store(memory, {DType::bf16, DType::fp32}, whole_model(outline_of(config)), {.shards = 2}, 1);
    std::size_t expected = 0;
    for (std::size_t i = 0; i < store.units.size(); ++i) {
        expected += padded_bytes(store.units[i].padded_elements(2), 4);
        EXPECT_EQ(store.buffers[i].gradient_sums.index, store.buffers[i].gradients.index);
    }
    EXPECT_EQ(memory.bytes(ArenaKind::gradients), expected);
    EXPECT_THROW(lay_out_store(memory, {DType::fp32, DType::bf16}, whole_model(outline_of(config)), {}, 1),
                 ProgrammingError);
}

TEST(FirstElement, IsTheSameForAnyNumberOfRanks) {
    std::vector<std::int64_t> expected;
    for (const int ranks : {1, 2, 3, 8}) {
        MemoryLayout memory;
        const StoreLayout layout = lay_out_store(memory, {DType::bf16, DType::fp32},
                                                 whole_model(outline_of(config)), {.shards = ranks}, 1);
        const auto device = make_cpu_device(1);
        const Arenas arenas(*device, memory);
        const ParameterStore store(*device, arenas, layout, 0, 0);
        std::vector<std::int64_t> places;
        std::int64_t end = 0;  // the end of the previous unit
        for (int unit = 0; unit < store.units(); ++unit) {
            places.push_back(store.first_element(unit));
            EXPECT_GE(places.back(), end);
            EXPECT_EQ(places.back() % 4, 0);
            end = places.back() + store.layout(unit).elements();
        }
        if (expected.empty()) expected = places;
        EXPECT_EQ(places, expected) << ranks << " ranks";
    }
}

// ---- a whole model

constexpr std::int64_t sequences = 4;  // those of the reference model "wide"
constexpr UpdateStep update{
    .step = 3, .learning_rate = 1e-3, .numbers = {0.9, 0.95, 1e-8}, .max_grad_norm = 1};

constexpr std::int64_t step_number = 9;
constexpr std::uint64_t gradient_seed = 4;

std::vector<std::int32_t> batch() {
    return probe::read_tokens(SafetensorsReader(reference_file("wide", "expected")));
}

probe::Model make_model(DType gradient_dtype, std::int64_t batch_sequences, std::int64_t micro_batch) {
    return {reference_file("wide", "weights"),
            reference_model("wide"),
            DType::bf16,
            batch_sequences,
            micro_batch,
            0,
            gradient_dtype};
}

// Each unit's gradients after adding one more sequence. The fp32 gradients of one sequence are a share of the
// batch's. The scale of the loss is a power of two, so it changes only exponents. The first is rounded to nearest, the
// others at random, by bits of the seed, the step, the micro-batch and the element.
void add_share(std::vector<std::vector<bfloat16>>& to, probe::Model& alone, std::int64_t sequence) {
    const std::vector<std::int32_t> tokens = batch();
    const std::size_t length = tokens.size() / sequences;
    alone.step(std::span(tokens).subspan(static_cast<std::size_t>(sequence) * length, length), false);
    to.resize(static_cast<std::size_t>(alone.store().units()));
    for (int unit = 0; unit < alone.store().units(); ++unit) {
        const Tensor share = alone.store().buffers(unit).gradients;
        std::vector<bfloat16>& sums = to[static_cast<std::size_t>(unit)];
        sums.resize(static_cast<std::size_t>(share.elements()), bfloat16{0});
        std::vector<float> exact(sums.size());
        for (std::size_t i = 0; i < sums.size(); ++i)
            exact[i] = to_float(sums[i]) + share.as<float>()[i] / sequences;
        if (sequence == 0) {
            std::ranges::transform(exact, sums.begin(), to_bfloat16);
        } else {
            round_stochastically(
                sums.data(), exact.data(), 0, std::ssize(sums),
                {.seed = gradient_seed, .first_element = alone.store().element_number(unit, 0)},
                sequence << 32 | step_number, Rounded::gradient);
        }
    }
}

TEST(GradientDtype, EveryMicroBatchIsAddedInFp32AndRoundedOnce) {
    probe::Model model = make_model(DType::bf16, sequences, 1), alone = make_model(DType::fp32, 1, 1);
    model.step(batch(), false, {}, {}, step_number, gradient_seed);
    std::vector<std::vector<bfloat16>> expected;
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) add_share(expected, alone, sequence);
    for (int unit = 0; unit < model.store().units(); ++unit) {
        const auto* gradients = model.store().buffers(unit).gradients.as<bfloat16>();
        std::int64_t differ = 0, nonzero = 0;
        for (const bfloat16 x : expected[static_cast<std::size_t>(unit)]) {
            differ += to_float(*gradients++) != to_float(x) ? 1 : 0;
            nonzero += to_float(x) != 0 ? 1 : 0;
        }
        EXPECT_EQ(differ, 0) << model.store().layout(unit).name();
        EXPECT_GT(nonzero, 0);
    }
}

TEST(StochasticRounding, OfTheStoreIsThatOfTheUpdate) {
    for (const DType gradient_dtype : {DType::fp32, DType::bf16}) {
        probe::Model model = make_model(gradient_dtype, sequences, 2),
                     nearest = make_model(gradient_dtype, sequences, 2);
        model.step(batch(), true, update, 5);
        nearest.step(batch(), true, update);
        const auto bits = [](probe::Model& of, Tensor UnitBuffers::*flat) {
            std::vector<std::byte> all;
            for (int unit = 0; unit < of.store().units(); ++unit) {
                const Tensor tensor = of.store().buffers(unit).*flat;
                all.insert(all.end(), tensor.data, tensor.data + tensor.bytes());
            }
            return all;
        };
        const auto parameters = &UnitBuffers::parameters, master = &UnitBuffers::master;
        EXPECT_TRUE(bits(model, master) == bits(nearest, master));
        const std::vector<std::byte> updated = bits(model, parameters);
        EXPECT_FALSE(updated == bits(nearest, parameters));
        // A resumed run recreates the parameters in this way.
        nearest.store().round_stochastically(5, update.step);
        EXPECT_TRUE(bits(nearest, parameters) == updated);
        nearest.store().round_stochastically(5, update.step + 1);
        EXPECT_FALSE(bits(nearest, parameters) == updated);
        nearest.store().round_stochastically(6, update.step);
        EXPECT_FALSE(bits(nearest, parameters) == updated);
    }
}

}  // namespace
}  // namespace llmc
