// Families drawn at random: every legal trace trains to the gradients of the interpreter, the same bits with
// every kind of recompute, and generates what it evaluates. Also the layers of strange_family.h that are
// rare, and the families that users can choose.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "interpreted_training.h"
#include "mpi_test.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

using strange::normal;
using test::TrainingSetting;

constexpr std::int64_t tokens = 4, vocabulary = 29;

class Random {
  public:
    explicit Random(unsigned seed) : numbers_(seed) {}
    int below(int count) { return static_cast<int>(numbers_() % static_cast<unsigned>(count)); }
    bool coin() { return below(2) == 0; }
    std::int64_t width() { return coin() ? 16 : 24; }

  private:
    std::mt19937 numbers_;
};

// Draws the operations of a part. Each value is used at least once.
class Drawing {
  public:
    Drawing(Trace& trace, Random& random) : t_(trace), random_(random) {}

    // The part's output, of this width.
    int draw(int input, std::int64_t width) {
        made_ = {{input, false}};
        for (int steps = 1 + random_.below(4); steps > 0; --steps) step();
        int sum = -1;
        for (auto& [value, is_used] : std::vector(made_)) {
            if (is_used) continue;
            const int end = t_[value].features() == width ? value : branch(value, width);
            sum = sum < 0 ? end : add(t_, sum, end);
        }
        return random_.coin() || sum == input ? layernorm(t_, name("ln"), sum, true) : sum;
    }

  private:
    std::string name(const char* kind) { return kind + std::to_string(names_++); }
    int pick() {
        auto& [value, is_used] =
            made_[static_cast<std::size_t>(random_.below(static_cast<int>(made_.size())))];
        is_used = true;
        return value;
    }
    int pick_of_width(std::int64_t width) {
        const int value = pick();
        return t_[value].features() == width ? value : branch(value, width);
    }
    int down(int x, std::int64_t width) {
        const int addend = product(t_, name("down"), x, {width}, by_inputs(), random_.coin(), normal);
        const int sum = scatter(t_, addend);
        return random_.below(6) == 0 ? add(t_, sum, scatter(t_, addend)) : sum;
    }
    // Two products, or attention between two, on the rows of a norm.
    int branch(int x, std::int64_t width) {
        const bool is_norm = t_[x].name.starts_with("ln") && !t_[x].name.ends_with(".sum");
        const int all = gather(t_, is_norm ? x : norm(x, random_.coin()));
        const int first = up(all, width);
        return random_.below(4) == 0 ? add(t_, first, up(all, width)) : first;
    }
    int norm(int x, bool has_weight) {
        return random_.coin() ? layernorm(t_, name("ln"), x, random_.coin())
                              : rmsnorm(t_, name("ln"), x, has_weight, 1e-5);
    }
    int up(int all, std::int64_t width) {
        if (random_.below(2) == 0) return down(packed(all), width);
        const bool is_attention = random_.below(3) == 0, has_bias = random_.coin();
        const Shape outputs =
            is_attention ? Shape{3, 4, 1 + random_.below(4)} : Shape{4 + 4 * random_.below(3)};
        const ProductSplit split = is_attention ? by_outputs(1, "heads") : by_outputs(0, "channels");
        // The product and the attention after it give their values the same name, which values may have.
        // Names of parameters must differ.
        ++names_;
        const std::string up = "up" + std::to_string(names_ % 3) + "." + std::to_string(names_);
        int made = random_.coin() ? product_gelu(t_, up, all, outputs, split, has_bias, normal)
                                  : product(t_, up, all, outputs, split, has_bias, normal);
        if (is_attention) made = attention(t_, up, made, {4, 4});
        const int sum = down(made, width);
        return random_.below(4) == 0 ? add(t_, sum, down(made, width)) : sum;
    }
    // Several products as one, and an operation on all of them: attention, or an activation.
    int packed(int all) {
        const bool has_bias = random_.coin();
        ++names_;
        const std::string up = "packed" + std::to_string(names_);
        if (random_.coin()) {
            const Piece channels{4 + 4 * random_.below(3), "channels"};
            std::vector<PackedMatrix> matrices = {{up + ".a", channels}, {up + ".b", channels}};
            const bool is_gated = random_.coin();
            if (!is_gated) matrices.pop_back();
            const int made = packed_product(t_, up, all, matrices, {}, has_bias, normal);
            return is_gated ? swiglu(t_, up, made) : relu_squared(t_, up, made);
        }
        // A norm over all heads does not suit ranks that share a key head.
        const bool over_all = random_.below(4) == 0;
        const HeadCounts heads{4, over_all ? 4 : std::int64_t{1} << random_.below(3)};
        const std::int64_t size = 2 + 2 * random_.below(2), window = random_.below(tokens);
        const Piece queries{4, "heads"}, keys{heads.keys, "key heads", true};
        const int qkv =
            packed_product(t_, up, all, {{up + ".q", queries}, {up + ".k", keys}, {up + ".v", keys}}, {size},
                           has_bias, normal);
        const RopeAngles angles{tokens, size, 10};
        if (!over_all && random_.coin()) {
            const int rotated = random_.coin() ? rope(t_, qkv, heads, angles, random_.coin()) : qkv;
            return attention(t_, up, rotated, heads, window);
        }
        HeadNorm of{.over_all = over_all, .eps = 1e-5};
        if (random_.coin()) of.q = up + ".q_norm";
        if (random_.coin()) of.k = up + ".k_norm";
        const int normed = head_norm(t_, qkv, heads, of);
        const int qk = random_.coin() ? rope(t_, normed, heads, angles, random_.coin()) : normed;
        return attention(t_, up, qkv, heads, window, qk);
    }
    void step() {
        const int x = pick();
        const std::int64_t width = t_[x].features();
        switch (random_.below(5)) {
            case 0:
                // A part has at least one parameter, so this norm has a weight.
                return keep(norm(x, true));
            case 1:
                return keep(branch(x, random_.width()));
            case 2:
                return keep(add(t_, x, pick_of_width(width)));
            case 3: {
                const int addend = pick_of_width(width);
                const auto [sum, normalised] = random_.coin()
                                                   ? add_layernorm(t_, name("ln"), x, addend, random_.coin())
                                                   : add_rmsnorm(t_, name("ln"), x, addend, true, 1e-5);
                if (random_.coin()) keep(sum);
                return keep(normalised);
            }
            default:
                return keep(add(t_, x, branch(x, width)));
        }
    }
    void keep(int value) { made_.emplace_back(value, false); }

    Trace& t_;
    Random& random_;
    std::vector<std::pair<int, bool>> made_{};  // streams; whether something uses them
    int names_ = 0;
};

Part layer(Random& random, const char* name, std::int64_t input, std::int64_t output) {
    Trace t(name, "h.{}", tokens, input);
    return t.finish(Drawing(t, random).draw(t.input(), output));
}

Model random_model(unsigned seed) {
    Random random(seed);
    const std::int64_t outer = random.width(), inner = random.width();
    const ParamSpec table{.name = "wte.weight",
                          .shape = {vocabulary, outer},
                          .init = {.stddev = 0.5},
                          .tensor_dim = 0,
                          .row_multiple = vocabulary_multiple};
    Trace first("embedding", "", tokens);
    Trace last("head", "", tokens, outer);
    const int embedded = scatter(first, embedding(first, table, std::nullopt));
    const ClassifierTerms terms{.cap = random.coin() ? 3.0F : 0.0F, .z_loss = random.coin() ? 0.1F : 0.0F};
    head_loss(last, gather(last, layernorm(last, random.coin() ? "ln.f" : "logits.f", last.input(), true)),
              table, true, terms);
    return {.runs = {{.parts = {first.finish(embedded)}},
                     {.parts = {layer(random, "a {}", outer, inner), layer(random, "b {}", inner, outer)},
                      .count = 2,
                      .is_layer = true},
                     {.parts = {layer(random, "c {}", outer, outer)}, .count = 4, .is_layer = true},
                     {.parts = {last.finish()}}},
            .sequence_length = tokens,
            .vocabulary = vocabulary,
            .description = "a random model"};
}

// The meshes that the job's ranks can have.
std::vector<TrainingSetting> meshes(const Model& model) {
    std::vector<TrainingSetting> all;
    const int ranks = test::world().size();
    for (const int pipeline : {1, 2, 4}) {
        for (const int tensor : {1, 2, 4}) {
            for (const bool sequence_parallel : {false, true}) {
                if (ranks % (pipeline * tensor) != 0 || (sequence_parallel && tensor == 1)) continue;
                const int data = ranks / pipeline / tensor;
                all.push_back({.model = &model,
                               .pipeline = pipeline,
                               .tensor = tensor,
                               .sequence_parallel = sequence_parallel,
                               .sharding = {.stage = data > 1 ? 3 : 0, .shards = data},
                               .sequences = 16,
                               .micro_batches = pipeline == 4 ? 4 : 2,
                               .reads = true});
            }
        }
    }
    return all;
}

// The bound is that of sums in fp32 of some hundred terms, through ten layers or more.
void expect_trained(TrainingSetting setting) {
    std::vector<test::TrainingResult> results;
    for (const RecomputeKind kind : {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block}) {
        setting.recompute = {.kind = kind};
        SCOPED_TRACE(to_string(setting));
        const test::TrainingResult& result = results.emplace_back(test::train(test::world(), setting));
        test::expect_bytes_of_list(result);
        constexpr double bound = 1e-3;
        if (test::world().rank() == 0) test::expect_interpreted(setting, result, bound, bound);
        EXPECT_NEAR(result.generated, result.diagnosed, 2e-4 * result.diagnosed);
        test::expect_same(result, results.front());
    }
}

TEST(RandomFamily, TrainsAsItsInterpreter) {
    if (test::world().size() == 3) GTEST_SKIP() << "takes 1, 2, 4 or 8 ranks";
    for (unsigned seed = 1; seed <= 16; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        const Model model = random_model(seed);
        const std::vector<TrainingSetting> all = meshes(model);
        TrainingSetting setting = all[seed % all.size()];
        if (setting.pipeline > 1 && seed % 2 == 0) setting.schedule = PipelineSchedule::zb_h1;
        expect_trained(setting);
    }
}

TEST(StrangeFamily, HasTheGradientsOfItsInterpreterInRareLayers) {
    if (test::world().size() > 2) GTEST_SKIP() << "takes 1 or 2 ranks";
    const Model model = strange::model_of_rare_layers();
    for (const TrainingSetting& setting : meshes(model)) expect_trained(setting);
}

}  // namespace
}  // namespace llmc
