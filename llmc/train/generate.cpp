#include "llmc/train/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/data/tokenizer.h"
#include "llmc/train/outputs.h"
#include "llmc/train/report.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace {

// Options that say nothing about a text from given weights.
// clang-format off
constexpr std::string_view of_training[] = {
    "train-data", "val-data", "steps", "global-batch-tokens", "micro-batch-size", "gradient-dtype", "recompute",
    "recompute-every", "reduce-every", "check-replicas-every", "lr", "warmup-steps", "lr-schedule",
    "min-lr-fraction", "weight-decay", "beta1", "beta2", "eps", "grad-clip", "stochastic-rounding", "val-every",
    "val-batches", "eval-hellaswag", "eval-every", "eval-examples", "sample-every", "metrics",
    "checkpoint-every", "export", "print-model", "print-step", "pipeline-timeline"};
// clang-format on

void take_model(Options& options, const CheckpointInfo& checkpoint) {
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    if (!options.given.contains("model")) options.model = model_of(checkpoint);
    for (auto& [name, size] : options.of_model.sizes) {
        if (!size && then.contains(name) && then[name].is_number()) size = then[name].get<std::int64_t>();
    }
    for (auto& [name, is_on] : options.of_model.switches) {
        // One that a checkpoint does not know was on.
        if (!options.given.contains(name)) is_on = then.value(name, true);
    }
    if (options.bpe_directory.empty() && then.contains("bpe-dir") && then["bpe-dir"].is_string())
        options.bpe_directory = then["bpe-dir"];
}

// Standard output as far as somebody reads it.
class TextOutput {
  public:
    void write(std::string_view text) {
        if (failure_ != 0 || text.empty()) return;
        last_ = text.back();
        if (std::fwrite(text.data(), 1, text.size(), stdout) < text.size() || std::fflush(stdout) != 0)
            failure_ = errno;
    }
    // The text ends with its line.
    void finish() {
        if (last_ != '\n') write("\n");
    }
    bool is_read() const { return failure_ == 0; }
    // Who reads may have read enough, as `| head` does.
    void require_written() const {
        if (failure_ != 0 && failure_ != EPIPE)
            user_error("cannot write standard output: {}", std::strerror(failure_));
    }

  private:
    int failure_ = 0;  // errno
    char last_ = '\n';
};

// Seconds of what a text begins with, and of the tokens behind.
class Clock {
  public:
    void see_token() {
        const auto now = std::chrono::steady_clock::now();
        if (tokens_++ == 0) first_ = now;
        last_ = now;
    }
    std::string summary() const {
        if (tokens_ == 0) return "no tokens";
        const std::chrono::duration<double> until_first = first_ - start_, since = last_ - first_;
        std::string text = fmt::format("{}, the first after {}", plural(tokens_, "token"),
                                       human_seconds(until_first.count()));
        if (tokens_ > 1) {
            text += fmt::format(", then {:.1f} tokens/s",
                                static_cast<double>(tokens_ - 1) / std::max(since.count(), 1e-9));
        }
        return text;
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), first_, last_;
    std::int64_t tokens_ = 0;
};

}  // namespace

void settle_generation(Options& options) {
    if (!options.resume && options.init.empty()) {
        user_error(
            "--generate needs weights: give --resume with a checkpoint's directory, or alone for the newest "
            "one, "
            "or --init with a file");
    }
    // What a configuration file has for the run that it is of is passed over.
    for (const std::string_view option : of_training) {
        if (options.given.contains(option))
            user_error("--generate prints text and does no more; leave out --{}", option);
    }
    if (options.resume) {
        if (options.given.contains("init"))
            user_error("--generate takes its weights from --resume or from --init; leave one out");
        const std::filesystem::path out_dir = choose_out_dir(options);
        const std::optional<CheckpointInfo> checkpoint = find_checkpoint(options, out_dir);
        if (!checkpoint) {
            user_error("--generate: there is no checkpoint in {}; give --resume the directory of one",
                       (options.out_dir.empty() ? out_dir.parent_path() : out_dir).string());
        }
        options.resume = checkpoint->directory.string();
        take_model(options, *checkpoint);
    }
    options.steps = 0;
    options.recompute = name_of(RecomputeKind::selective);
    options.recompute_every.reset();
}

void settle_batch_of_generation(Options& options, const Mesh& mesh) {
    options.micro_batch_size = 1;
    options.global_batch_tokens = options.sequence_length() * mesh.data_ranks() * mesh.pipeline;
}

void say_beside_text(std::string_view line) {
    std::FILE* const stream = std::getenv("TRAIN_GPT_ONE_STREAM") != nullptr ? stdout : stderr;
    fmt::print(stream, "{}\n", line);
    std::fflush(stream);
}

void generate_text(Generation& generation, Trainer& trainer, Communicator& world,
                   const StopSignals& signals) {
    auto& [options, plan, prompt, text, weights] = generation;
    const bool together = trainer.generates_together(), speaks = world.rank() == 0;
    if (!speaks && !together) return;
    std::signal(SIGPIPE, SIG_IGN);
    if (speaks) {
        say_beside_text(fmt::format("train_gpt {}: {}, {} parameters, {}, {}", version(), weights,
                                    grouped(count_parameters(plan.spec.model)), name_of(plan.spec.dtype),
                                    trainer.device().description()));
    }
    TextOutput output;
    Clock clock;
    // What stands for a prompt that was not given is no text.
    if (speaks && !options.prompt.empty()) {
        for (const std::int32_t token : prompt) output.write(text.add(token));
    }
    const auto watch = [&](double) {
        const bool stops = signals.here() || !output.is_read();
        return together ? !on_any_rank(world, stops) : !stops;
    };
    const auto take = [&](std::int32_t token) {
        if (!speaks) return;
        clock.see_token();
        output.write(text.add(token));
    };
    trainer.generate(prompt, options.sample_tokens, watch, take);
    if (!speaks) return;
    output.write(text.rest());
    output.finish();
    say_beside_text(clock.summary());
    output.require_written();
}

}  // namespace llmc
