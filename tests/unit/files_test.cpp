#include "hypermla/base/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/base/hash.h"
#include "hypermla/base/json_file.h"
#include "hypermla/base/process.h"

namespace hypermla::files_test {
namespace {
namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  Files() {
    std::string name = (fs::temp_directory_path() / "hypermla-files-XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
  }
  ~Files() override { fs::remove_all(dir_); }
  int count() const { return static_cast<int>(std::distance(fs::directory_iterator(dir_), fs::directory_iterator{})); }
  fs::path dir_;
};

// Runs `body` in a child process; its exit status, or minus the signal.
int in_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(Files, WriteThenReadKeepsEveryByte) {
  std::string bytes(300000, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 131 >> 3);
  for (const std::string& contents : {bytes, std::string{}, std::string("a\0b\r\n", 5)}) {
    write_file_atomic(dir_ / "f", contents);
    EXPECT_EQ(read_file(dir_ / "f"), contents);
    EXPECT_EQ(count(), 1);
  }
}

TEST_F(Files, ErrorsNameThePathAndWhatToDo) {
  const std::string missing = error_of([&] { read_file(dir_ / "none"); });
  EXPECT_NE(missing.find((dir_ / "none").string()), std::string::npos);
  EXPECT_NE(missing.find("check the path"), std::string::npos);
  EXPECT_NE(error_of([&] { read_file(dir_); }).find("give the path of a file"), std::string::npos);
  EXPECT_NE(error_of([&] { write_file_atomic(dir_ / "no/f", "x"); }).find((dir_ / "no/f").string()), std::string::npos);
  EXPECT_EQ(count(), 0);
}

// Json writes, copies and compares what lies in each other recursively: such a file would end the process.
TEST_F(Files, JsonIsNoDeeperThanAnyFileOfThisProgram) {
  const fs::path path = dir_ / "file.json";
  const auto nested = [&](int depth, const char* begin, const char* end) {
    std::string text;
    for (int i = 0; i < depth; ++i) text += begin;
    text += "1";
    for (int i = 0; i < depth; ++i) text += end;
    write_file_atomic(path, text);
    return read_json(path);
  };
  EXPECT_EQ(nested(9, "[", "]").dump(), "[[[[[[[[[1]]]]]]]]]");
  EXPECT_EQ(nested(2, "{\"a\":", "}").dump(), "{\"a\":{\"a\":1}}");
  EXPECT_TRUE(nested(200000, "[", "]").is_discarded());
  EXPECT_TRUE(nested(200000, "{\"a\":", "}").is_discarded());
  EXPECT_TRUE(nested(3, "[", "").is_discarded());
}

TEST_F(Files, NewFileRefusesToReplace) {
  write_new_file(dir_ / "f", "old");
  EXPECT_THROW(write_new_file(dir_ / "f", "new"), Error);
  EXPECT_EQ(read_file(dir_ / "f"), "old");
}

TEST_F(Files, FullDiskLeavesTheOldFileAndNothingElse) {
  write_file_atomic(dir_ / "f", "old");
  // A limit on the size of files makes write() fail part way, as a full disk does.
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return error_of([&] { write_file_atomic(dir_ / "f", std::string(100000, 'x')); }).find("ulimit -f") !=
           std::string::npos;
  });
  EXPECT_EQ(status, 1);
  EXPECT_EQ(read_file(dir_ / "f"), "old");
  EXPECT_EQ(count(), 1);
}

TEST_F(Files, ReadersNeverSeeAHalfWrittenFileThoughTheWriterIsKilled) {
  const std::string versions[2] = {std::string(200000, 'a'), std::string(300000, 'b')};
  write_file_atomic(dir_ / "f", versions[0]);
  for (int round = 0; round < 10; ++round) {
    const pid_t writer = ::fork();
    if (writer == 0) {
      for (int i = 0;; ++i) write_file_atomic(dir_ / "f", versions[i % 2]);
    }
    bool seen[2] = {false, false};  // both, so that the writer is known to be at work when it is killed
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!(seen[0] && seen[1]) && std::chrono::steady_clock::now() < deadline) {
      const std::string bytes = read_file(dir_ / "f");
      for (int i = 0; i < 2; ++i) seen[i] = seen[i] || bytes == versions[i];
      EXPECT_TRUE(bytes == versions[0] || bytes == versions[1]) << bytes.size();
    }
    EXPECT_TRUE(seen[0] && seen[1]);
    ::usleep(200 * round);
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    const std::string bytes = read_file(dir_ / "f");
    EXPECT_TRUE(bytes == versions[0] || bytes == versions[1]) << bytes.size();
  }
  sweep_scratch(dir_);
  EXPECT_EQ(count(), 1);
}

TEST_F(Files, SweepTakesTheDeadAndLeavesTheLivingAndTheForeign) {
  const fs::path target = dir_ / "entry";
  EXPECT_EQ(in_child([&] {
              const Scratch dead(target, Scratch::Kind::directory);
              write_new_file(dead.path() / "part", "half");
              ::kill(::getpid(), SIGKILL);
              return 0;
            }),
            -SIGKILL);
  write_file_atomic(dir_ / "notes.tmp", "someone's own");
  EXPECT_EQ(count(), 2);
  {
    const Scratch living(target, Scratch::Kind::directory);
    sweep_scratch(dir_);
    EXPECT_TRUE(fs::exists(living.path()));
    EXPECT_EQ(count(), 2);
  }
  EXPECT_EQ(count(), 1);
  EXPECT_TRUE(fs::exists(dir_ / "notes.tmp"));
  sweep_scratch(dir_ / "absent");
}

TEST_F(Files, WhatIsTheOwnersAloneDoesNotFollowTheUmask) {
  for (const mode_t mask : {0, 0022, 0777}) {
    const fs::path dir = dir_ / std::to_string(mask);
    const mode_t before = ::umask(mask);
    make_directories(dir / "a/b", Access::owner);
    write_file_atomic(dir / "a/b/f", "x", Access::owner);
    write_new_file(dir / "a/b/g", "x");
    const Scratch scratch(dir / "a/b/s", Scratch::Kind::directory);
    ::umask(before);
    for (const fs::path& path : {dir, dir / "a", dir / "a/b", scratch.path()})
      EXPECT_EQ(fs::status(path).permissions(), fs::perms(0700)) << path;
    for (const fs::path& path : {dir / "a/b/f", dir / "a/b/g"})
      EXPECT_EQ(fs::status(path).permissions(), fs::perms(0600)) << path;
  }
  const mode_t before = ::umask(0027);
  make_directories(dir_ / "d");
  write_file_atomic(dir_ / "d/f", "x");
  ::umask(before);
  EXPECT_EQ(fs::status(dir_ / "d").permissions(), fs::perms(0750));
  EXPECT_EQ(fs::status(dir_ / "d/f").permissions(), fs::perms(0640));
}

TEST_F(Files, TrustsWhatNoOneElseMayWrite) {
  const fs::path cache = dir_ / "parent/cache";
  require_trusted(cache);  // it does not exist yet
  make_directories(cache, Access::owner);
  require_trusted(cache);
  for (const auto mode : {0770, 0702}) {
    fs::permissions(cache, fs::perms(mode));
    EXPECT_FALSE(trusted(cache));
    EXPECT_NE(error_of([&] { require_trusted(cache); }).find("chmod -R go-w '" + cache.string()), std::string::npos);
  }
  fs::permissions(cache, fs::perms(0755));
  fs::permissions(dir_ / "parent", fs::perms(0777));
  const std::string replaceable = error_of([&] { require_trusted(cache / "not/there/yet"); });
  EXPECT_NE(replaceable.find("chmod o-w '" + (dir_ / "parent").string()), std::string::npos) << replaceable;
  fs::permissions(dir_ / "parent", fs::perms(01777));
  require_trusted(cache);

  fs::create_symlink(cache, dir_ / "link");
  require_trusted(dir_ / "link");
  EXPECT_FALSE(trusted(dir_ / "link"));
  fs::permissions(cache, fs::perms(0777));
  EXPECT_THROW(require_trusted(dir_ / "link"), Error);
  if (::geteuid() != 0) return;
  fs::permissions(cache, fs::perms(0700));
  ASSERT_EQ(::chown(cache.c_str(), 65534, 65534), 0);
  EXPECT_NE(error_of([&] { require_trusted(cache); }).find("belongs to another user (uid 65534)"), std::string::npos);
}

TEST_F(Files, ALinkIsWrittenThrough) {
  write_file_atomic(dir_ / "file", "old");
  fs::create_symlink("file", dir_ / "near");
  fs::create_symlink(dir_ / "near", dir_ / "link");
  fs::create_symlink("absent", dir_ / "dangling");
  write_file_atomic(dir_ / "link", "new");
  write_file_atomic(dir_ / "dangling", "first");
  EXPECT_EQ(read_file(dir_ / "file"), "new");
  EXPECT_EQ(read_file(dir_ / "absent"), "first");
  for (const char* link : {"near", "link", "dangling"}) EXPECT_TRUE(fs::is_symlink(dir_ / link)) << link;
}

// What an installation brings is as safe as the code of it that runs, which the same users may write.
TEST_F(Files, TrustsWhatOnlyWritersOfTheProgramMayWrite) {
  const fs::path image = dir_ / "bin/program", brought = dir_ / "brought";
  make_directories(image.parent_path(), Access::owner);
  write_new_file(image, "code");
  make_directories(brought, Access::owner);
  const auto mode = [](const fs::path& path, int bits) { fs::permissions(path, fs::perms(bits)); };
  const auto is_trusted = [&] {
    const bool all = error_of([&] { require_trusted(brought, "", image); }) == "no error";
    EXPECT_EQ(trusted(brought, image), all);
    return all;
  };
  mode(brought, 0775);
  EXPECT_FALSE(is_trusted());
  mode(image, 0775);  // as with a umask of 0002
  EXPECT_TRUE(is_trusted());
  EXPECT_FALSE(trusted(brought));
  mode(image, 0755), mode(image.parent_path(), 0775);  // who may replace it
  EXPECT_TRUE(is_trusted());
  mode(image.parent_path(), 01775);
  EXPECT_FALSE(is_trusted());
  mode(image, 0777), mode(brought, 0777);
  EXPECT_FALSE(is_trusted());
  if (::geteuid() != 0) return;
  mode(image, 0775), mode(image.parent_path(), 0755), mode(brought, 0775);
  ASSERT_EQ(::chown(brought.c_str(), 65534, 65534), 0);
  EXPECT_FALSE(is_trusted());
  ASSERT_EQ(::chown(image.c_str(), 65534, 65533), 0);
  EXPECT_FALSE(is_trusted());  // another group may write it
  mode(brought, 0755);
  EXPECT_TRUE(is_trusted());
  ASSERT_EQ(::chown(brought.c_str(), 65533, 65533), 0);
  EXPECT_FALSE(is_trusted());
}

TEST_F(Files, APipeIsNoFile) {
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  ::alarm(20);
  EXPECT_NE(error_of([&] { read_file(dir_ / "pipe"); }).find("is not a regular file"), std::string::npos);
  ::alarm(0);
}

TEST_F(Files, MakeDirectoriesIsRepeatableAndRefusesAFile) {
  make_directories(dir_ / "a/b/c");
  make_directories(dir_ / "a/b/c");
  EXPECT_TRUE(fs::is_directory(dir_ / "a/b/c"));
  write_file_atomic(dir_ / "f", "");
  EXPECT_THROW(make_directories(dir_ / "f"), Error);
  EXPECT_THROW(make_directories(dir_ / "f/g"), Error);
}

TEST_F(Files, WhatCannotBeWrittenIsKnownBefore) {
  require_writable(dir_);
  require_writable(dir_ / "a/b");
  EXPECT_EQ(count(), 0);
  write_file_atomic(dir_ / "f", "");
  EXPECT_NE(error_of([&] { require_writable(dir_ / "f/a"); }).find("check the path"), std::string::npos);
  EXPECT_NE(error_of([&] { require_writable("/proc/none/x"); }).find("/proc/none/x"), std::string::npos);
  ::chmod(dir_.c_str(), 0555);
  const int status = in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 77;  // permissions do not bind root
    return error_of([&] { require_writable(dir_ / "a/b"); }).find("change its permissions") == std::string::npos ? 1
                                                                                                                 : 0;
  });
  ::chmod(dir_.c_str(), 0755);
  if (status == 77) GTEST_SKIP() << "root cannot give up its rights here";
  EXPECT_EQ(status, 0);
}

// Vectors of FIPS 180-4's examples (the first three and the last) and of lengths around the padding's edges.
TEST(ContentHash, IsSha256CutTo128Bits) {
  EXPECT_EQ(content_hash(""), "e3b0c44298fc1c149afbf4c8996fb924");
  EXPECT_EQ(content_hash("abc"), "ba7816bf8f01cfea414140de5dae2223");
  EXPECT_EQ(content_hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039");
  EXPECT_EQ(content_hash(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9a");
  EXPECT_EQ(content_hash(std::string(56, 'a')), "b35439a4ac6f0948b6d6f9e3c6af0f5f");
  EXPECT_EQ(content_hash(std::string(63, 'a')), "7d3e74a05d7db15bce4ad9ec0658ea98");
  EXPECT_EQ(content_hash(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209");
  EXPECT_EQ(content_hash(std::string(65, 'a')), "635361c48bb9eab14198e76ea8ab7f1a");
  EXPECT_EQ(content_hash(std::string(119, 'a')), "31eba51c313a5c08226adf18d4a359cf");
  EXPECT_EQ(content_hash(std::string(120, 'a')), "2f3d335432c70b580af0e8e1b3674a7c");
  EXPECT_EQ(content_hash(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67");
}

std::string shell(const std::string& script, ProcessOptions options = {}) {
  return run_process({"sh", "-c", script}, options).out;
}

TEST(RunProcess, GivesStatusOutputAndErrors) {
  const ProcessResult result = run_process({"sh", "-c", "printf out; printf err >&2; exit 7"});
  EXPECT_EQ(result.status, 7);
  EXPECT_EQ(result.out, "out");
  EXPECT_EQ(result.err, "err");
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(run_process({"sh", "-c", "kill -9 $$"}).status, 128 + 9);
}

TEST(RunProcess, PassesArgumentsUntouched) {
  EXPECT_EQ(run_process({"printf", "%s", "a b $HOME 'q' *"}).out, "a b $HOME 'q' *");
}

TEST(RunProcess, CarriesLargeInputAndOutput) {
  const std::string input(5 << 20, 'z');
  EXPECT_EQ(run_process({"cat"}, {.environment = {}, .input = input, .timeout = {}}).out, input);
  // A program that does not read its input must neither end nor block this process.
  EXPECT_EQ(run_process({"true"}, {.environment = {}, .input = input, .timeout = {}}).status, 0);
}

TEST(RunProcess, AddsToTheEnvironment) {
  ::setenv("HYPERMLA_TEST_A", "old", 1);
  ::setenv("HYPERMLA_TEST_B", "kept", 1);
  const ProcessOptions options{.environment = {{"HYPERMLA_TEST_A", "new"}}, .input = {}, .timeout = {}};
  EXPECT_EQ(shell("printf $HYPERMLA_TEST_A-$HYPERMLA_TEST_B", options), "new-kept");
}

TEST(RunProcess, LeaksNoFile) {
  const int leaky = ::open("/dev/null", O_RDONLY);  // without O_CLOEXEC, as other libraries open theirs
  ASSERT_GE(leaky, 3);
  EXPECT_EQ(shell("test -e /proc/self/fd/" + std::to_string(leaky) + " && printf leaked"), "");
  ::close(leaky);
  auto open_files = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator{}); };
  const auto before = open_files();
  for (int i = 0; i < 5; ++i) shell("true");
  EXPECT_THROW(run_process({"/no/such/program"}), Error);
  EXPECT_EQ(open_files(), before);
}

TEST(RunProcess, TimeoutEndsTheProgramAndItsChildren) {
  const auto start = std::chrono::steady_clock::now();
  ProcessOptions options;
  options.timeout = std::chrono::milliseconds(200);
  const ProcessResult result = run_process({"sh", "-c", "sleep 60 & printf $!; sleep 60"}, options);
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  // The grandchild is gone, or a zombie that no process of this container reaps.
  const std::string state = shell("sleep 0.2; cut -d' ' -f3 /proc/" + result.out + "/stat 2>/dev/null");
  EXPECT_TRUE(state.empty() || state == "Z\n") << state;
}

TEST(RunProcess, AStopEndsTheProgram) {
  std::stop_source stop;
  std::thread later([&] {
    ::usleep(50000);
    stop.request_stop();
  });
  const ProcessResult result = run_process({"sh", "-c", "sleep 600 & wait"}, {.stop = stop.get_token()});
  later.join();
  EXPECT_EQ(result.status, 128 + SIGTERM);
  EXPECT_FALSE(result.timed_out);
}

TEST(RunProcess, EndProgramsEndsThoseThatRunAndStartsNone) {
  const int status = in_child([] {
    std::thread later([] {
      ::usleep(50000);
      end_programs();
    });
    const int ended = run_process({"sleep", "600"}).status;
    later.join();
    return ended == 128 + SIGTERM && error_of([] { run_process({"true"}); }) != "no error" ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
}

TEST(RunProcess, SaysWhatCouldNotBeStarted) {
  const std::string message = error_of([] { run_process({"no-such-program-anywhere"}); });
  EXPECT_NE(message.find("no-such-program-anywhere"), std::string::npos);
  EXPECT_NE(message.find("install it"), std::string::npos);
  EXPECT_THROW(run_process({}), Error);
}

}  // namespace
}  // namespace hypermla::files_test
