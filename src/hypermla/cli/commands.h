// The commands of `hypermla`. Each takes the words after its name and returns the exit status: 0, or 1 when the command
// was carried out and the answer is no (a check failed). Everything else is an Error.
#pragma once

#include <string>
#include <vector>

namespace hypermla {

using Words = std::vector<std::string>;

int kernel_command(const Words& words);
int predict_command(const Words& words);
int choose_command(const Words& words);
int compile_command(const Words& words);
int verify_command(const Words& words);
int clone_command(const Words& words);
int compare_command(const Words& words);  // 3: cannot be told
int kb_command(const Words& words);
int next_command(const Words& words);
int devlog_command(const Words& words);
int device_command(const Words& words);
int verify_file_command(const Words& words);  // 3: compiled only, there is no device for it
int bench_file_command(const Words& words);
int compile_job_command(const Words& words);  // of a worker process: one job, read from standard input
int list_command();

}  // namespace hypermla
