#include "llmc/train/chat.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/core/text.h"
#include "llmc/data/chat_format.h"
#include "llmc/data/prompt.h"
#include "llmc/train/folder_options.h"
#include "llmc/train/generate.h"
#include "llmc/train/prepared_run.h"

namespace llmc {
namespace {

// Lines of standard input.
class LineReader {
  public:
    // The next line, without its end; none at the end of the input, or once `stops` after a signal.
    template <class Stops>
    std::optional<std::string> next(Stops&& stops) {
        while (true) {
            if (const std::size_t end = text_.find('\n'); end != std::string::npos) return take(end, 1);
            if (stops()) return std::nullopt;
            // read() would begin again after a signal, and poll() does not see one that comes just before it.
            pollfd input{STDIN_FILENO, POLLIN, 0};
            if (poll(&input, 1, milliseconds_between_looks) <= 0) continue;
            char block[4096];
            const ssize_t size = read(STDIN_FILENO, block, sizeof(block));
            if (size > 0) text_.append(block, static_cast<std::size_t>(size));
            if (size == 0 || (size < 0 && errno != EINTR))
                return text_.empty() ? std::nullopt : std::optional(take(text_.size(), 0));
        }
    }

  private:
    static constexpr int milliseconds_between_looks = 100;

    std::string take(std::size_t end, std::size_t mark) {
        std::string line = text_.substr(0, end);
        text_.erase(0, end + mark);
        if (line.ends_with('\r')) line.pop_back();
        return line;
    }

    std::string text_;
};

// Without blanks at both ends.
std::string_view without_blanks(std::string_view line) {
    constexpr const char* blanks = " \t";
    const std::size_t begin = std::min(line.find_first_not_of(blanks), line.size());
    return line.substr(begin, line.find_last_not_of(blanks) + 1 - begin);
}

class Conversation {
  public:
    explicit Conversation(PreparedRun& run)
        : run_(run), format_(find_chat_format(run.tokenizer_files, folder_of_tokenizer(run.options))) {
        reset();
    }

    void reset() {
        messages_.clear();
        if (!run_.options.system.empty()) messages_.push_back({Role::system, run_.options.system});
    }

    void answer(const std::string& message) {
        messages_.push_back({Role::user, message});
        const std::vector<std::int32_t> prompt = fitted_prompt();
        if (prompt.empty()) return;
        TextStream text(&*run_.tokenizer);
        TextOutput output;
        std::vector<std::int32_t> answer;
        const std::int64_t before = kept_.computed_rows;
        const auto watch = [&](double) { return !run_.session.signals().here() && output.is_read(); };
        const auto take = [&](std::int32_t token) {
            answer.push_back(token);
            output.write(text.add(token));
        };
        const auto whole =
            run_.trainer->generate({.prompt = prompt,
                                    .count = std::min(most_tokens(), context() - std::ssize(prompt)),
                                    .ends = run_.ends,
                                    .take = take,
                                    .kept = &kept_},
                                   watch);
        output.write(text.rest());
        answer.empty() ? output.write("\n") : output.finish();
        output.require_written();
        messages_.push_back({Role::assistant, run_.tokenizer->decode(answer)});
        const auto rows = kept_.computed_rows - before;
        if (run_.options.verbose) {
            say_beside_text(fmt::format("{} before the answer, {} in it, {} computed",
                                        plural(std::ssize(prompt), "token"), answer.size(),
                                        plural(rows, "row")));
        }
        const bool is_cut =
            whole && std::ssize(answer) == std::min(most_tokens(), context() - std::ssize(prompt));
        if (is_cut)
            say_beside_text(
                fmt::format("note: the answer was cut after {}", plural(std::ssize(answer), "token")));
    }

  private:
    std::int64_t context() const { return run_.model().sequence_length; }
    // Of an answer.
    std::int64_t most_tokens() const {
        return run_.options.was_chosen("sample-tokens") ? run_.options.sample_tokens : context();
    }

    std::vector<std::int32_t> encoded(std::span<const ChatMessage> messages) const {
        return run_.tokenizer->encode(format_.pieces(messages));
    }

    // The tokens of the conversation, without its oldest turns if it would leave too little room for an answer.
    // Without the last message, and empty, if that alone is too long.
    std::vector<std::int32_t> fitted_prompt() {
        const std::int64_t room = context() - std::min(most_tokens(), context() / 4);
        const std::ptrdiff_t first = messages_[0].role == Role::system ? 1 : 0;
        std::vector<ChatMessage> kept = messages_;
        std::vector<std::int32_t> prompt = encoded(kept);
        while (std::ssize(prompt) > room && std::ssize(kept) > first + 1) {
            kept.erase(kept.begin() + first, kept.begin() + first + 2);
            prompt = encoded(kept);
        }
        if (std::ssize(prompt) >= context()) {
            say_beside_text(fmt::format(
                "this message has too many tokens: the conversation would have {}, and --seq-len is {}; "
                "say it in fewer words",
                prompt.size(), context()));
            messages_.pop_back();
            return {};
        }
        if (kept.size() < messages_.size() && !std::exchange(has_said_, true)) {
            say_beside_text(fmt::format(
                "note: the conversation is longer than --seq-len {} allows, so its oldest turns are left out "
                "from now on{}",
                context(),
                run_.options.resume ? "; --export DIR, then --chat --init DIR --seq-len N has room for more"
                                    : ""));
        }
        messages_ = std::move(kept);
        return prompt;
    }

    PreparedRun& run_;
    ChatFormat format_;
    std::vector<ChatMessage> messages_;
    KeptContext kept_;
    bool has_said_ = false;
};

}  // namespace

void check_chat(const PreparedRun& run) {
    if (run.plan.spec.mesh.world() > 1)
        user_error("--chat is for one process, and there are {}; start it without --processes",
                   run.plan.spec.mesh.world());
    if (!run.tokenizer)
        user_error("--chat: the model has no tokenizer; give the folder of one with --tokenizer");
    static_cast<void>(find_chat_format(run.tokenizer_files, folder_of_tokenizer(run.options)));
}

void chat(PreparedRun& run) {
    Conversation conversation(run);
    LineReader lines;
    StopSignals& signals = run.session.signals();
    const bool is_terminal = isatty(STDIN_FILENO) != 0 && isatty(STDERR_FILENO) != 0;
    say_beside_text(generation_header(run));
    if (run.ends.empty())
        say_beside_text(
            "note: the model's folder names no token that ends an answer (eos_token_id in "
            "generation_config.json), so "
            "answers go on to --sample-tokens");
    if (is_terminal)
        say_beside_text(
            "Each line is a message. Ctrl-C ends an answer; /reset begins a new conversation, and /quit "
            "ends.");
    while (true) {
        if (is_terminal) write_error("> ");
        const std::optional<std::string> line = lines.next([&] { return signals.here(); });
        const std::string_view said = line ? without_blanks(*line) : "/quit";
        if (said == "/quit") break;
        if (said == "/reset") {
            conversation.reset();
        } else if (!said.empty()) {
            conversation.answer(*line);
            signals.forget_interrupt();
            if (signals.here()) break;
        }
    }
    if (is_terminal) write_error("\n");
}

}  // namespace llmc
