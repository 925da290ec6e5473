// Continues a prompt: during training (Sampler), or alone (--generate; chat.h has --chat). --generate opens no data
// and writes no file. It writes only the text to standard output, token by token, and one line before and one after
// it to standard error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "llmc/parallel/mesh.h"
#include "llmc/train/options.h"
#include "llmc/train/sources.h"

namespace llmc {

struct PreparedRun;

// UserError without weights, and for options that ask for more than text.
void check_generation(const Options& options);
// Settles the options that follow from --generate: the checkpoint's model, if no sizes were given; no
// training; and selective recompute, which keeps the fewest activations that still include keys and values.
void settle_generation(Options& options, const Sources& sources);
// Once the mesh is known: sets the smallest possible batch.
void settle_batch_of_generation(Options& options, const Mesh& mesh);

// Prints a line that is not part of the text, to standard error.
void say_beside_text(std::string_view line);
// "train_gpt 0.1.0: FOLDER, 134,515,008 parameters, fp32, CPU": what generates the text.
std::string generation_header(const PreparedRun& run);

// Writes text to standard output, until a write fails.
class TextOutput {
  public:
    void write(std::string_view text);
    // The text ends with a new line.
    void finish() {
        if (last_ != '\n') write("\n");
    }
    bool is_read() const { return failure_ == 0; }
    // UserError if a write failed. EPIPE is no error: the reader has closed the pipe, as `head` does.
    void require_written() const;

  private:
    int failure_ = 0;  // errno
    char last_ = '\n';
};

// Continues the prompt during training, and prints the text.
class Sampler {
  public:
    // The run outlives it.
    explicit Sampler(PreparedRun& run) : run_(run) {}
    // Prints a sample of the current model. All ranks call it. Prints nothing once the run is asked to stop.
    void sample();
    // Whether a sample is due after this step. train() prints the one after the last step itself.
    bool is_due(std::int64_t step) const;

  private:
    PreparedRun& run_;
};

// --generate: writes the prompt and its continuation, until a signal asks it to stop or the reader closes
// standard output. UserError if writing fails for another reason. All ranks call it.
void generate_text(PreparedRun& run);

}  // namespace llmc
