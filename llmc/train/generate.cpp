#include "llmc/train/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/data/prompt.h"
#include "llmc/train/adapter_options.h"
#include "llmc/train/outputs.h"
#include "llmc/train/prepared_run.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace {

// Options that have no meaning for a text from given weights.
// clang-format off
constexpr std::string_view of_training[] = {
    "train-data", "val-data", "new-data", "steps", "global-batch-tokens", "micro-batch-size", "gradient-dtype",
    "precision", "moments-dtype", "master-dtype", "fp8", "fp8-history", "offload-optimizer", "recompute",
    "recompute-every", "reduce-every", "check-replicas-every", "lr", "warmup-steps", "lr-schedule",
    "min-lr-fraction", "optimizer", "weight-decay", "grad-clip", "stochastic-rounding", "val-every",
    "val-batches", "eval-hellaswag", "eval-every", "eval-examples", "sample-every", "metrics",
    "checkpoint-every", "export", "print-model", "print-step", "pipeline-timeline"};
// clang-format on

// Measures the seconds until the first token, and from there to the last.
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

void check_generation(const Options& options) {
    const char* const mode = options.chat ? "--chat" : "--generate";
    if (!options.resume && options.init.empty() && options.lora.empty()) {
        user_error(
            "{} needs weights; give --resume (alone for the newest checkpoint, or with a "
            "checkpoint's directory), or --init with a file, or --lora with an adapter",
            mode);
    }
    if (options.chat && options.given.contains("prompt"))
        user_error("--chat reads messages from its input; leave out --prompt, or use --generate");
    // Options of training are ignored if a configuration file has them, and refused on the command line.
    const auto refuse = [&](std::string_view option) {
        if (options.given.contains(option)) user_error("{} only prints text; leave out --{}", mode, option);
    };
    for (const std::string_view option : of_training) refuse(option);
    for (const HyperparameterOption& option : hyperparameter_options()) refuse(option.name);
}

void settle_generation(Options& options, const Sources& sources) {
    if (options.resume) {
        if (options.given.contains("init") && !sources.checkpoint->base)
            user_error("{} takes its weights from --resume or --init, not both; leave one out",
                       options.chat ? "--chat" : "--generate");
        options.resume = sources.checkpoint->directory.string();
        // A configuration file may be another run's: the checkpoint's model and switches have precedence.
        std::erase_if(options.lines, [&](const auto& line) {
            const auto found = options.model_options.find(line.first);
            auto* is_on = found == options.model_options.end()
                              ? nullptr
                              : std::get_if<std::optional<bool>>(&found->second);
            if (is_on) is_on->reset();
            return line.first == "model" || is_on;
        });
        take_model(options, *sources.checkpoint);
        take_adapters(options, sources);
    }
    options.steps = 0;
    options.recompute = name_of(RecomputeKind::selective);
    options.recompute_every.reset();
}

void settle_batch_of_generation(Options& options, const Mesh& mesh) {
    options.micro_batch_size = 1;
    options.global_batch_tokens = options.sequence_length() * mesh.data_ranks() * mesh.pipeline;
}

std::string generation_header(const PreparedRun& run) {
    const std::string weights = run.checkpoint
                                    ? fmt::format("{} after step {}", run.checkpoint->directory.string(),
                                                  run.trainer->progress().step)
                                    : run.options.weights;
    return fmt::format("train_gpt {}: {}, {} parameters, {}, {}", version(), weights,
                       grouped(count_parameters(run.model())), name_of(run.plan.spec.dtype),
                       run.device().description());
}

void TextOutput::write(std::string_view text) {
    if (failure_ != 0 || text.empty()) return;
    last_ = text.back();
    if (std::fwrite(text.data(), 1, text.size(), stdout) < text.size() || std::fflush(stdout) != 0)
        failure_ = errno;
}

void TextOutput::require_written() const {
    if (failure_ != 0 && failure_ != EPIPE)
        user_error("cannot write to standard output: {}", std::strerror(failure_));
}

void say_beside_text(std::string_view line) { write_error(fmt::format("{}\n", line)); }

bool Sampler::is_due(std::int64_t step) const {
    return step < run_.options.steps && llmc::is_due(run_.options.sample_every, step);
}

void Sampler::sample() {
    const Options& options = run_.options;
    Session& session = run_.session;
    Trainer& trainer = *run_.trainer;
    if (options.sample_tokens == 0) return;
    trainer.finish_update();
    const bool together = trainer.generates_together(), is_rank_zero = session.is_rank_zero();
    if (!is_rank_zero && !together) return;
    const auto watch = [&](double share) {
        session.console().doing("sampling", share);
        return together ? !session.ask_to_stop() : !session.signals().here();
    };
    std::vector<std::int32_t> tokens(run_.shown_prompt().begin(), run_.shown_prompt().end());
    const auto more =
        trainer.generate({.prompt = run_.prompt, .count = options.sample_tokens, .ends = run_.ends}, watch);
    if (!more || !is_rank_zero) return;
    tokens.insert(tokens.end(), more->begin(), more->end());
    session.console().sample(trainer.progress().step, printable(tokens, run_.tokenizer_or_none()));
}

void generate_text(PreparedRun& run) {
    Trainer& trainer = *run.trainer;
    HostCommunicator& world = run.session.world();
    const bool together = trainer.generates_together(), is_rank_zero = run.is_rank_zero();
    if (!is_rank_zero && !together) return;
    if (is_rank_zero) say_beside_text(generation_header(run));
    TextStream text(run.tokenizer_or_none());
    TextOutput output;
    Clock clock;
    // An empty prompt is encoded as one token (encode_prompt) that is not printed.
    if (is_rank_zero && !run.options.prompt.empty()) {
        for (const std::int32_t token : run.shown_prompt()) output.write(text.add(token));
    }
    const auto watch = [&](double) {
        const bool stops = run.session.signals().here() || !output.is_read();
        return together ? !on_any_rank(world, stops) : !stops;
    };
    const auto take = [&, &text = text](std::int32_t token) {
        if (!is_rank_zero) return;
        clock.see_token();
        output.write(text.add(token));
    };
    trainer.generate(
        {.prompt = run.prompt, .count = run.options.sample_tokens, .ends = run.ends, .take = take}, watch);
    if (!is_rank_zero) return;
    output.write(text.rest());
    output.finish();
    say_beside_text(clock.summary());
    output.require_written();
}

}  // namespace llmc
