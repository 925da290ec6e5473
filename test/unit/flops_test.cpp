// The table of operations (llmc/model/operation.h) gives the same floating-point operations as the operands
// of the device's operations (dev/cpu/timed_ops.h).
#include <gtest/gtest.h>

#include <string_view>
#include <utility>
#include <vector>

#include "dev/cpu/timed_ops.h"
#include "test/gpt2_config.h"
#include "test/probe/run_model.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

// Padded columns of the logits are computed too. This configuration has none.
constexpr GPTConfig config{.layers = 2, .heads = 2, .channels = 12, .sequence_length = 7, .vocabulary = 128};

double of_tokens(const Part& part, const Node& node, bool forward, bool backward) {
    const Work work = node.operation->work(part, node);
    const double keys = static_cast<double>(part.tokens + 1) / 2, times = forward ? 1 : 0;
    double sum = times * (work.products + keys * work.pairs + work.other);
    if (backward) sum += 2 * work.products + 2.5 * keys * work.pairs + work.other_backward;
    return sum * static_cast<double>(part.tokens);
}

// Without operations that belong to no node: the norm, the update, and calls that only set or copy memory.
double flops_of(const bench::WorkByOperation& work) {
    double flops = 0;
    for (const auto& [name, of] : work) {
        for (const std::string_view prefix :
             {"matmul", "attention", "layernorm", "rmsnorm", "fused_residual", "encoder", "add", "head_norm",
              "rope", "swiglu", "relu_squared"})
            flops += name.starts_with(prefix) ? of.flops : 0;
    }
    return flops;
}

// One part alone: memory for all its lists, and the work they do in it, call by call.
class Running {
  public:
    Running(const Part& part, const PartLists& lists, const Scratch& scratch) : part_(part), lists_(lists) {
        for (const auto* buffers : {&lists.kept, &lists.kept_gradients}) {
            auto& to = buffers == &lists.kept ? kept_ : kept_gradients_;
            for (const PartBuffer& buffer : *buffers) to.push_back(memory(buffer.shape.elements()));
        }
        for (const Scratch::Buffer& buffer : scratch.buffers)
            scratch_.push_back(memory(buffer.shape.elements()));
        for (const RopeAngles& angles : scratch.angles)
            angles_.push_back(memory(angles.positions * angles.head_size));
        // One product reads joined parameters as one.
        std::int64_t all = 0, place = 0;
        for (const PartParameter& parameter : part.parameters)
            all += stored_shape(parameter.spec, 1).elements();
        std::byte *const parameters = memory(all), *const gradients = memory(all);
        for (const PartParameter& parameter : part.parameters) {
            const auto offset = static_cast<std::size_t>(place) * sizeof(float);
            parameters_.push_back(parameters + offset);
            gradients_.push_back(gradients + offset);
            place += stored_shape(parameter.spec, 1).elements();
        }
    }

    // The operations of a list's calls for a node, without the sums of several gradients of one value.
    double flops(const List& list, const Node& node) {
        List calls;
        for (const ListCall& call : list) {
            const bool is_sum =
                call.name == "add" && (&list != &lists_.forward || node.operation->name != "add");
            if (call.node == &node && !is_sum) calls.push_back(call);
        }
        const std::int64_t T = part_.tokens;
        PartMemory all;
        for (const Space space : {Space::tokens, Space::targets}) all[space] = memory(T);
        for (const Space space : {Space::input, Space::output, Space::input_gradient, Space::output_gradient})
            all[space] = memory(T * std::max(part_.input_width(), part_.output_width()));
        all.all(Space::angles) = angles_;
        all.all(Space::kept) = kept_;
        all.all(Space::scratch) = scratch_;
        all.all(Space::kept_gradient) = kept_gradients_;
        all.all(Space::parameter) = parameters_;
        all.all(Space::parameter_gradient) = gradients_;
        constexpr std::int64_t enough = 1 << 18;
        timed_.ops().set_workspace({memory(enough), DType::fp32, {enough}});
        timed_.take_work();
        run_list(calls, all, 1,
                 {.ops = timed_.ops(), .ranks = ranks_, .node = nullptr, .loss_scale = 1, .rows = {}});
        return flops_of(timed_.take_work());
    }

  private:
    std::byte* memory(std::int64_t elements) {
        return reinterpret_cast<std::byte*>(buffers_.emplace_back(static_cast<std::size_t>(elements)).data());
    }
    const Part& part_;
    const PartLists& lists_;
    std::unique_ptr<Device> device_ = make_cpu_device(1);
    bench::TimedDevice timed_{*device_};
    TensorParallel ranks_;
    std::vector<std::vector<float>> buffers_;
    std::vector<std::byte*> kept_, kept_gradients_, scratch_, angles_, parameters_, gradients_;
};

std::vector<Part> parts_of(const Model& model) {
    std::vector<Part> parts;
    for (const Model::Run& run : model.runs) parts.insert(parts.end(), run.parts.begin(), run.parts.end());
    return parts;
}

Model small(std::string_view name, std::vector<std::pair<std::string, ModelValue>> changes) {
    for (const auto& [option, size] : {std::pair{"layers", 1},
                                       {"seq-len", 7},
                                       {"vocab-size", 128},
                                       {"heads", 4},
                                       {"kv-heads", 2},
                                       {"channels", 12},
                                       {"mlp-size", 10}})
        changes.insert(changes.begin(), {option, std::int64_t{size}});
    return model_with(name, changes);
}

TEST(OperationFlops, AreThoseOfTheDevicesOperations) {
    const ModelValue size = std::int64_t{4}, all = std::string("all"), behind = std::string("behind");
    for (const Model& model :
         {gpt2(config), strange::model(), small("llama-tiny", {{"head-size", size}, {"window", size}}),
          small("llama-tiny", {{"head-size", size}, {"qk-norm", all}, {"norms", behind}}),
          small("nanochat-tiny", {{"channels", std::int64_t{16}}})}) {
        for (const Part& part : parts_of(model)) {
            Scratch scratch;
            const PartLists lists = derive_lists(part, {.logits_rows = part.tokens}, scratch);
            Running running(part, lists, scratch);
            for (const Node& node : part.nodes) {
                SCOPED_TRACE(part.name + ": " + node.name);
                if (node.operation->is_forward_in_backward && model.vocabulary % vocabulary_multiple != 0)
                    continue;
                EXPECT_EQ(running.flops(lists.forward, node), of_tokens(part, node, true, false));
                EXPECT_EQ(running.flops(lists.backward, node),
                          of_tokens(part, node, part.makes_losses(), true));
            }
        }
    }
}

// With a window W, row t sees min(t + 1, W) of its keys: with W = 3, 7 rows see 1 + 2 + 5 * 3,
// without it 28.
TEST(OperationFlops, OfAttentionAreFewerWithAWindow) {
    const auto pairs = [](std::int64_t window) {
        const Part part =
            small("llama-tiny", {{"window", window}, {"head-size", std::int64_t{4}}}).runs[1].parts[0];
        const auto node = std::ranges::find_if(
            part.nodes, [](const Node& one) { return one.operation->name == "attention"; });
        return node->operation->work(part, *node).pairs;
    };
    const double all = pairs(0);
    EXPECT_EQ(all, 4.0 * 4 * 4);  // 4 heads of 4 elements
    EXPECT_DOUBLE_EQ(pairs(3), all * (1 + 2 + 5 * 3) / 28);
    EXPECT_DOUBLE_EQ(pairs(1), all * 7 / 28);
    EXPECT_EQ(pairs(7), all);
    EXPECT_EQ(pairs(9), all);
    const auto flops = [](std::int64_t window) {
        return training_flops_per_token(
            small("llama-tiny", {{"window", window}, {"head-size", std::int64_t{4}}}));
    };
    EXPECT_EQ(flops(0), flops(7));
    EXPECT_LT(flops(3), flops(4));
}

TEST(OperationFlops, OfAStepAreThoseOfItsParts) {
    const auto cpu = make_cpu_device(1);
    auto device = std::make_unique<bench::TimedDevice>(*cpu);
    bench::TimedDevice& timed = *device;
    const Model model = gpt2(config);
    probe::Model program(model, DType::fp32, 4, 2, 0, DType::fp32, std::move(device));
    const std::vector<std::int32_t> text(static_cast<std::size_t>(4 * (model.sequence_length + 1)));
    timed.take_work();
    program.step(text, false);
    double of_step = 0;
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            for (const Node& node : part.nodes)
                of_step += static_cast<double>(4 * run.count) * of_tokens(part, node, true, true);
        }
    }
    EXPECT_EQ(flops_of(timed.take_work()), of_step);
}

}  // namespace
}  // namespace llmc
