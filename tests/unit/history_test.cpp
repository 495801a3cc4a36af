#include "hypermla/tune/history.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"

namespace hypermla::history_test {
namespace {
namespace fs = std::filesystem;

class History : public testing::Test {
 protected:
  History() {
    std::string name = (fs::temp_directory_path() / "hypermla-history-XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
  }
  ~History() override { fs::remove_all(dir_); }
  int files_beside(const fs::path& path) const {
    return static_cast<int>(std::distance(fs::directory_iterator(path.parent_path()), fs::directory_iterator{}));
  }
  fs::path dir_;
  const Json results_ = Json::array({{{"tiling", {{"Bm", 64}}}, {"seconds", {1.25e-4, 0.1, 1.0 / 3.0}}}});
};

TEST_F(History, SavesAndLoadsExactly) {
  const TuningHistory store(dir_, "flash_mla-0123", "b32_s16", "NVIDIA H200/sm_90");
  EXPECT_EQ(store.path(), dir_ / "flash_mla-0123/b32_s16/NVIDIA_H200_sm_90/autotuning.json");
  EXPECT_EQ(store.load(), Json::array());
  EXPECT_TRUE(fs::is_empty(dir_));  // looking creates nothing
  store.save(results_);
  EXPECT_EQ(store.load(), results_);
  store.save(Json::array());
  EXPECT_EQ(store.load(), Json::array());
  EXPECT_EQ(files_beside(store.path()), 1);
}

TEST_F(History, EveryKeyHasItsOwnFile) {
  TuningHistory(dir_, "k", "p", "d").save(results_);
  for (const TuningHistory& other : {TuningHistory(dir_, "k2", "p", "d"), TuningHistory(dir_, "k", "p2", "d"),
                                     TuningHistory(dir_, "k", "p", "d2")}) {
    EXPECT_EQ(other.load(), Json::array());
  }
}

TEST_F(History, RefusesKeysThatNameNoDirectory) {
  for (const char* key : {"", ".", ".."}) EXPECT_THROW(TuningHistory(dir_, key, "p", "d"), Error) << key;
  EXPECT_EQ(TuningHistory(dir_, "../../etc", "p", "d").path(), dir_ / ".._.._etc/p/d/autotuning.json");
}

TEST_F(History, CorruptFilesAreSetAsideAndTunedAgain) {
  const TuningHistory store(dir_, "k", "p", "d");
  for (const std::string damaged : {"", "[{\"tiling\": {", "{}", "null", "\xff\xfe"}) {
    make_directories(store.path().parent_path());
    write_file_atomic(store.path(), damaged);
    EXPECT_EQ(store.load(), Json::array()) << damaged;
    EXPECT_FALSE(fs::exists(store.path())) << damaged;
    EXPECT_EQ(read_file(store.path().string() + ".corrupt"), damaged);
    store.save(results_);
    EXPECT_EQ(store.load(), results_);
  }
}

// Opening a pipe that has no writer would wait for ever: then the alarm ends this program.
TEST_F(History, APipeInItsPlaceIsSetAside) {
  const TuningHistory store(dir_, "k", "p", "d");
  make_directories(store.path().parent_path());
  ASSERT_EQ(::mkfifo(store.path().c_str(), 0600), 0);
  ::alarm(20);
  EXPECT_EQ(store.load(), Json::array());
  ::alarm(0);
  store.save(results_);
  EXPECT_EQ(store.load(), results_);
}

TEST_F(History, IsForItsOwnerAlone) {
  const TuningHistory store(dir_, "k", "p", "d");
  const mode_t before = ::umask(0);
  store.save(results_);
  ::umask(before);
  EXPECT_EQ(fs::status(store.path()).permissions(), fs::perms(0600));
  EXPECT_EQ(fs::status(store.path().parent_path()).permissions(), fs::perms(0700));
}

TEST_F(History, AFailedSaveKeepsTheLastOne) {
  const TuningHistory store(dir_, "k", "p", "d");
  store.save(results_);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      store.save(Json(std::vector<int>(10000, 1)));
    } catch (const Error&) {
      ::_exit(0);
    }
    ::_exit(1);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(store.load(), results_);
  EXPECT_EQ(files_beside(store.path()), 1);
}

TEST_F(History, SavingClearsWhatAKilledSaveLeft) {
  const TuningHistory store(dir_, "k", "p", "d");
  store.save(results_);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const Scratch half(store.path(), Scratch::Kind::file);
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(pid, nullptr, 0);
  EXPECT_EQ(files_beside(store.path()), 2);
  EXPECT_EQ(store.load(), results_);
  store.save(results_);
  EXPECT_EQ(files_beside(store.path()), 1);
}

}  // namespace
}  // namespace hypermla::history_test
