// Printed texts: times, the progress line, and the operations that the share of the peak counts.
// test_terminal.py tests the terminal itself with the whole program.
#include <gtest/gtest.h>

#include <string>

#include "llmc/core/text.h"
#include "llmc/train/console.h"
#include "test/gpt2_config.h"

namespace llmc {
namespace {

TEST(Text, ClockTime) {
    EXPECT_EQ(clock_time(-1), "0:00");
    EXPECT_EQ(clock_time(0.4), "0:00");
    EXPECT_EQ(clock_time(59.6), "1:00");
    EXPECT_EQ(clock_time(3599), "59:59");
    EXPECT_EQ(clock_time(3600), "1:00:00");
    EXPECT_EQ(clock_time(2 * 86400 + 3 * 3600 + 4 * 60 + 5), "2 d 3:04:05");
}

TEST(ProgressLine, SaysWhatIsDoneAndLeft) {
    EXPECT_EQ(progress_line(1, 350, 1400, 35, 100),
              "[=======>                      ]  25%  350/1,400  0:35 passed, 1:45 left");
    EXPECT_EQ(progress_line(1, 1400, 1400, 140, 100),
              "[==============================] 100%  1,400/1,400  2:20 passed, 0:00 left");
}

TEST(ProgressLine, CountsTheTimeOfThisRunsStepsOnly) {
    // A resumed run has done 10 of the 110 finished steps, at one second each.
    EXPECT_NE(progress_line(101, 110, 130, 10, 100).find("110/130  0:10 passed, 0:20 left"),
              std::string::npos);
    EXPECT_NE(progress_line(1, 0, 5, 1, 100).find("? left"), std::string::npos);
}

TEST(ProgressLine, KeepsToTheColumns) {
    for (int columns = 9; columns < 120; ++columns) {
        const std::string line = progress_line(1, 999, 2000, 3661, columns);
        EXPECT_LE(std::ssize(line), columns) << line;
        EXPECT_NE(line.find("999/2,000"), std::string::npos) << line;
        EXPECT_EQ(line.find("]  49%  999/2,000") != std::string::npos, columns >= 52) << line;
    }
    EXPECT_EQ(progress_line(1, 5, 10, 1, 41), "[==> ]  50%  5/10  0:01 passed, 0:01 left");
    EXPECT_EQ(progress_line(1, 5, 10, 1, 40), " 50%  5/10  0:01 passed, 0:01 left");
    EXPECT_EQ(progress_line(1, 5, 10, 1, 30), " 50%  5/10  0:01 left");
    EXPECT_EQ(progress_line(1, 5, 10, 1, 20), "5/10  0:01 left");
    // The terminal cuts what is still too long.
    EXPECT_EQ(progress_line(1, 5, 10, 1, 3), "5/10");
}

TEST(Text, FittedKeepsToItsWidth) {
    EXPECT_EQ(fitted(2.345678, 5, 9), "2.34568");
    EXPECT_EQ(fitted(999.99999, 5, 9), "999.99999");
    EXPECT_EQ(fitted(1000, 5, 9), "1.000e+03");
    EXPECT_EQ(fitted(1.2346e30, 5, 9), "1.235e+30");
}

// The printed line of a step, with its heading.
std::string printed(const StepMetrics& metrics) {
    testing::internal::CaptureStdout();
    {
        Console console(true);
        console.step(metrics);
    }
    return testing::internal::GetCapturedStdout();
}

TEST(Console, ColumnsStayInLineWhereNumbersAreHuge) {
    StepMetrics metrics;
    metrics.loss = 3.14159e20;
    metrics.grad_norm = 2.71828e30;
    metrics.learning_rate = 0.001;
    metrics.step_ms = 123456789;
    EXPECT_EQ(printed(metrics),
              "step       loss  grad norm         lr         ms     tokens/s\n"
              "   0  3.142e+20  2.718e+30  1.000e-03  1.235e+08            0\n");
}

TEST(Console, ShowsTheShareOfThePeakWhereItIsKnown) {
    StepMetrics metrics;
    metrics.step = 1;
    metrics.loss = 2;
    metrics.tokens_per_second = 1000;
    EXPECT_EQ(printed(metrics).find("MFU"), std::string::npos);
    metrics.model_flops_utilization = 0.4567;
    const std::string text = printed(metrics);
    EXPECT_NE(text.find("tokens/s     MFU\n"), std::string::npos) << text;
    EXPECT_NE(text.find("      1,000   45.7%\n"), std::string::npos) << text;
}

TEST(Flops, OfGpt2) {
    const GPTConfig config{
        .layers = 12, .heads = 12, .channels = 768, .sequence_length = 1024, .vocabulary = 50257};
    // 6 N, where N counts all weights but wpe (1024 x 768), biases and layernorms; 6 L C T for attention.
    const double matrices = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 768 * 4 * 768) + 50257 * 768;
    EXPECT_DOUBLE_EQ(training_flops_per_token(gpt2(config)), 6 * matrices + 6.0 * 12 * 768 * 1024);
    EXPECT_NEAR(matrices, static_cast<double>(count_parameters(gpt2(config))) - 1024 * 768, 0.002 * matrices);
}

}  // namespace
}  // namespace llmc
