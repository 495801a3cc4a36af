#include "hypermla/compile/cache.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/hash.h"

namespace hypermla::cache_test {
namespace {
namespace fs = std::filesystem;
using Contents = std::map<std::string, std::string>;

// The contents under a key follow from the key, so a reader knows what a writer in another process must have stored.
Contents contents_of(const std::string& key, std::size_t bytes = 200000) {
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>{}(key)));
  std::string artifact(bytes, '\0');
  for (char& byte : artifact) byte = static_cast<char>(random());
  return {{"kernel.cu", "// " + key + "\n"}, {"kernel.cubin", artifact}};
}

Json report_of(const std::string& key) { return {{"registers", 128}, {"spill_bytes", 0}, {"compiler", "tile " + key}}; }

bool whole(const CacheEntry& entry, const std::string& key, std::size_t bytes = 200000) {
  for (const auto& [name, expected] : contents_of(key, bytes)) {
    if (read_file(entry.path(name)) != expected) return false;
  }
  return entry.report.at("compiler") == report_of(key).at("compiler");
}

// Starts `body` as another process, which ends with its result.
pid_t start(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  try {
    ::_exit(body());
  } catch (const std::exception& error) {  // the tests behind this one are the parent's
    std::fprintf(stderr, "%s\n", error.what());
    ::_exit(99);
  }
}

// The exit status, or minus the signal.
int finish(pid_t pid) {
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

class Cache : public testing::Test {
 protected:
  Cache() {
    std::string name = (fs::temp_directory_path() / "hypermla-cache-XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
    ::chmod(dir_.c_str(), 0755);
    root_ = dir_ / "cache";
  }
  ~Cache() override { fs::remove_all(dir_); }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& item : fs::directory_iterator(root_)) found.push_back(item.path().filename().string());
    return found;
  }

  fs::path dir_, root_;
};

TEST_F(Cache, PublishesAndFinds) {
  const KernelCache cache(root_);
  EXPECT_FALSE(cache.find("k"));
  EXPECT_FALSE(fs::exists(root_));  // looking for something creates nothing
  const CacheEntry published = cache.publish("k", contents_of("k"), report_of("k"));
  const auto found = cache.find("k");
  ASSERT_TRUE(found);
  EXPECT_TRUE(whole(*found, "k"));
  EXPECT_EQ(found->report, published.report);
  EXPECT_EQ(found->dir, root_ / "k");
  EXPECT_EQ(found->report["registers"], 128);
  EXPECT_EQ(found->report["uid"], ::geteuid());
  EXPECT_EQ(found->report["files"]["kernel.cubin"]["bytes"], 200000);
  EXPECT_EQ(found->report["files"]["kernel.cubin"]["hash"], content_hash(contents_of("k")["kernel.cubin"]));
  EXPECT_NE(error_of([&] { (void)found->path("kernel.so"); }).find("kernel.so"), std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{"k"});
}

TEST_F(Cache, TheFirstPublisherWins) {
  const KernelCache cache(root_);
  cache.publish("k", contents_of("k"), report_of("k"));
  const CacheEntry second = cache.publish("k", {{"kernel.cu", "other"}}, {{"compiler", "other"}});
  EXPECT_TRUE(whole(second, "k"));
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(Cache, KeepsReportsThatJsonCannotHold) {
  const KernelCache cache(root_);
  cache.publish("k", contents_of("k"),
                {{"log", "warning: \xff\xfe"}, {"ratio", std::nan("")}, {"files", 1}, {"hash", 2}});
  EXPECT_TRUE(cache.find("k"));
}

TEST_F(Cache, RefusesNamesThatLeaveTheEntry) {
  const KernelCache cache(root_);
  for (const std::string key : {"", ".", "..", "a/b", "../x", "k.1.0123456789abcdef.tmp"}) {
    EXPECT_THROW(cache.find(key), Error) << key;
    EXPECT_THROW(cache.publish(key, {}, {}), Error) << key;
  }
  for (const std::string name : {"", "..", "a/b", "report.json"})
    EXPECT_THROW(cache.publish("k", {{name, "x"}}, {}), Error);
  EXPECT_FALSE(fs::exists(root_));
}

TEST_F(Cache, SurvivesKillAtAnyMoment) {
  const KernelCache cache(root_);
  std::mt19937 random(7);
  int left_over = 0, visible = 0;
  for (int round = 0; round < 40; ++round) {
    const std::string prefix = "r" + std::to_string(round) + "-";
    const pid_t writer = start([&]() -> int {
      for (int i = 0;; ++i) {
        const std::string key = prefix + std::to_string(i % 20);
        if (i >= 20)
          fs::resize_file(root_ / key / "kernel.cubin", 5);  // then also the removal of damage is interrupted
        cache.publish(key, contents_of(key), report_of(key));
      }
    });
    // On a busy machine the writer may not have begun after the time alone; every fourth kill may still come that
    // early.
    const auto begun = [&] { return fs::exists(root_ / (prefix + "0")); };
    for (int waited = 0; round % 4 != 0 && !begun() && waited < 1000; ++waited) ::usleep(1000);
    ::usleep(1000 + random() % 60000);
    ::kill(writer, SIGKILL);
    ASSERT_EQ(finish(writer), -SIGKILL);
    if (!fs::exists(root_)) continue;
    for (const std::string& name : names()) {
      const bool under_construction = fs::path(name).extension() == ".tmp";
      left_over += under_construction;
      if (under_construction) continue;
      // Damaged on purpose, and its writer killed before it was replaced: find() must report it as absent. All others
      // must be complete.
      const bool damaged = fs::file_size(root_ / name / "kernel.cubin") == 5;
      const auto entry = cache.find(name);
      EXPECT_EQ(entry.has_value(), !damaged) << name;
      EXPECT_TRUE(!entry || whole(*entry, name)) << name;
      visible += entry.has_value();
    }
    cache.sweep();
    for (const std::string& name : names()) EXPECT_NE(fs::path(name).extension(), ".tmp") << name;
    fs::remove_all(root_);
  }
  EXPECT_GT(left_over, 5);  // otherwise no kill came at the right time and this test shows nothing
  EXPECT_GT(visible, 20);
}

TEST_F(Cache, SweepLeavesThoseAtWork) {
  const KernelCache cache(root_);
  make_directories(root_);
  const Scratch at_work(root_ / "k", Scratch::Kind::directory);
  EXPECT_EQ(finish(start([&] {
              cache.sweep();
              return 0;
            })),
            0);
  EXPECT_TRUE(fs::exists(at_work.path()));
}

TEST_F(Cache, ManyPublishersOfTheSameKeys) {
  const KernelCache cache(root_);
  constexpr int kProcesses = 8, kKeys = 12;
  std::vector<pid_t> processes;
  for (int p = 0; p < kProcesses; ++p) {
    processes.push_back(start([&] {
      for (int k = 0; k < kKeys; ++k) {
        const std::string key = "k" + std::to_string(k);
        try {
          cache.sweep();
          const CacheEntry entry = cache.publish(key, contents_of(key), report_of(key));
          const auto found = cache.find(key);
          if (!whole(entry, key) || !found || !whole(*found, key)) return 1;
        } catch (const std::exception&) {
          return 2;
        }
      }
      return 0;
    }));
  }
  for (const pid_t pid : processes) EXPECT_EQ(finish(pid), 0);
  EXPECT_EQ(names().size(), static_cast<std::size_t>(kKeys));  // one of each, and none under construction
}

TEST_F(Cache, AReportOfEndlessBracketsIsDamage) {
  const KernelCache cache(root_);
  cache.publish("k", contents_of("k"), report_of("k"));
  write_file_atomic(root_ / "k/report.json", "{\"hash\":" + std::string(100000, '[') + std::string(100000, ']') + "}",
                    Access::owner);
  EXPECT_FALSE(cache.find("k"));
  EXPECT_TRUE(names().empty());
}

TEST_F(Cache, ManyFindersOfOneDamagedEntryAndOneWinner) {
  const KernelCache cache(root_);
  for (int round = 0; round < 10; ++round) {
    cache.publish("k", contents_of("k"), report_of("k"));
    fs::resize_file(root_ / "k/kernel.cubin", 10);
    std::vector<pid_t> processes;
    for (int p = 0; p < 6; ++p) {
      processes.push_back(start([&] {
        const auto found = cache.find("k");
        const CacheEntry entry = found ? *found : cache.publish("k", contents_of("k"), report_of("k"));
        return whole(entry, "k") ? 0 : 1;  // and it stays, though others discard the damaged one meanwhile
      }));
    }
    for (const pid_t pid : processes) EXPECT_EQ(finish(pid), 0);
    EXPECT_EQ(names(), std::vector<std::string>{"k"});
  }
}

TEST_F(Cache, AnEntryRepairedWhileAFinderWaitsIsNotRemoved) {
  const KernelCache cache(root_);
  cache.publish("k", contents_of("k"), report_of("k"));
  fs::copy(root_ / "k", dir_ / "repaired");
  fs::resize_file(root_ / "k/kernel.cubin", 10);
  const pid_t finder = start([&] {
    ::usleep(100000);  // until the lock below is held; a child started later would hold it too
    return cache.find("k") ? 0 : 1;
  });
  {
    const FileDescriptor lock = lock_directory(root_);  // as another process that is discarding the entry
    ::usleep(300000);                                   // until the finder has seen the damage and waits
    fs::rename(root_ / "k", dir_ / "discarded");
    fs::rename(dir_ / "repaired", root_ / "k");
  }
  EXPECT_EQ(finish(finder), 0);
  EXPECT_TRUE(cache.find("k"));
}

void expect_sentence_and_nothing_left(const KernelCache& cache, const std::string& advice) {
  const std::string message = error_of([&] { cache.publish("big", contents_of("big", 1 << 20), report_of("big")); });
  EXPECT_NE(message.find(advice), std::string::npos) << message;
  EXPECT_TRUE(fs::is_empty(cache.root()));
  EXPECT_FALSE(cache.find("big"));
}

TEST_F(Cache, FileSizeLimitIsASentence) {
  // In a child, since a hard limit cannot be taken back. It fails write() part way, as a full disk does.
  const int status = finish(start([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100000, 100000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    expect_sentence_and_nothing_left(KernelCache(root_), "choose another directory");
    return HasFailure() ? 1 : 0;
  }));
  EXPECT_EQ(status, 0);
}

TEST_F(Cache, FullDiskIsASentenceAndTheCacheGoesOn) {
  make_directories(root_);
  if (::mount("tmpfs", root_.c_str(), "tmpfs", 0, "size=512k,mode=0700") != 0)
    GTEST_SKIP() << "mounting a tmpfs is not permitted here";
  const KernelCache cache(root_);
  expect_sentence_and_nothing_left(cache, "free some space");
  cache.publish("small", contents_of("small"), report_of("small"));
  EXPECT_TRUE(cache.find("small"));
  EXPECT_THROW(cache.publish("more", contents_of("more", 400000), report_of("more")), Error);
  EXPECT_TRUE(whole(*cache.find("small"), "small"));
  EXPECT_EQ(names(), std::vector<std::string>{"small"});
  EXPECT_EQ(::umount(root_.c_str()), 0);
}

void overwrite(const fs::path& path, const std::string& bytes) {
  fs::remove(path);
  write_new_file(path, bytes);
}

TEST_F(Cache, DamageOfAnyKindIsFoundRemovedAndRepaired) {
  const KernelCache cache(root_);
  const fs::path dir = root_ / "k", cubin = dir / "kernel.cubin", report = dir / "report.json";
  auto flip = [](const fs::path& path, std::size_t at) {
    std::string bytes = read_file(path);
    bytes.at(at) ^= 1;
    overwrite(path, bytes);
  };
  const std::map<std::string, std::function<void()>> damages{
      {"truncated artifact", [&] { fs::resize_file(cubin, fs::file_size(cubin) - 1); }},
      {"empty artifact", [&] { fs::resize_file(cubin, 0); }},
      {"flipped first bit", [&] { flip(cubin, 0); }},
      {"flipped last bit", [&] { flip(cubin, fs::file_size(cubin) - 1); }},
      {"flipped source", [&] { flip(dir / "kernel.cu", 3); }},
      {"no artifact", [&] { fs::remove(cubin); }},
      {"artifact is a directory", [&] { fs::remove(cubin), fs::create_directory(cubin); }},
      {"no report", [&] { fs::remove(report); }},
      {"empty report", [&] { overwrite(report, ""); }},
      {"report is no JSON", [&] { overwrite(report, "{\"files\": {"); }},
      {"report is no object", [&] { overwrite(report, "[1, 2]"); }},
      {"report lists no files", [&] { overwrite(report, "{}"); }},
      {"a figure of the report", [&] { flip(report, read_file(report).find("128")); }},
      {"empty directory", [&] { fs::remove_all(dir), fs::create_directory(dir); }},
      {"a file in its place", [&] { fs::remove_all(dir), overwrite(dir, "x"); }},
      {"a link to nowhere", [&] { fs::remove_all(dir), fs::create_symlink("nowhere", dir); }},
      {"a pipe in place of the artifact", [&] { fs::remove(cubin), ::mkfifo(cubin.c_str(), 0600); }},
      {"a pipe in place of the report", [&] { fs::remove(report), ::mkfifo(report.c_str(), 0600); }},
      {"an artifact that others may write", [&] { ::chmod(cubin.c_str(), 0666); }},
      {"a directory that others may write", [&] { ::chmod(dir.c_str(), 0770); }},
      {"a link to an artifact", [&] { fs::rename(cubin, dir_ / "k"), fs::create_symlink(dir_ / "k", cubin); }},
  };
  ::alarm(60);  // a pipe that is opened for reading waits for ever
  for (const auto& [what, damage] : damages) {
    for (const bool look_first : {true, false}) {
      cache.publish("k", contents_of("k"), report_of("k"));
      damage();
      if (look_first) {
        EXPECT_FALSE(cache.find("k")) << what;
        EXPECT_TRUE(fs::is_empty(root_)) << what;
      }
      EXPECT_TRUE(whole(cache.publish("k", contents_of("k"), report_of("k")), "k")) << what;
      EXPECT_EQ(names(), std::vector<std::string>{"k"}) << what;
      EXPECT_TRUE(cache.find("k")) << what;
    }
  }
  ::alarm(0);
}

TEST_F(Cache, IsForItsOwnerAloneWhateverTheUmask) {
  const mode_t before = ::umask(0);
  KernelCache(root_).publish("k", contents_of("k"), report_of("k"));
  ::umask(before);
  EXPECT_EQ(fs::status(root_).permissions(), fs::perms(0700));
  EXPECT_EQ(fs::status(root_ / "k").permissions(), fs::perms(0700));
  for (const auto& file : fs::directory_iterator(root_ / "k"))
    EXPECT_EQ(file.status().permissions(), fs::perms(0600)) << file.path();
}

TEST_F(Cache, AnotherUsersEntriesAreNotServed) {
  const KernelCache cache(root_);
  cache.publish("k", contents_of("k"), report_of("k"));
  ::chmod(root_.c_str(), 0777);
  for (const std::string key : {"k", "new"}) {
    const auto publish = [&] { cache.publish(key, contents_of(key), report_of(key)); };
    EXPECT_NE(error_of(publish).find("may be written by other users"), std::string::npos);
  }
  EXPECT_THROW(cache.find("k"), Error);
  ::chmod(root_.c_str(), 0700);
  EXPECT_TRUE(cache.find("k"));
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  for (const char* name : {"", "kernel.cubin", "report.json"}) {
    ASSERT_EQ(::chown((root_ / "k" / name).c_str(), 65534, 65534), 0);
    EXPECT_FALSE(cache.find("k")) << name;
    cache.publish("k", contents_of("k"), report_of("k"));
  }
}

TEST_F(Cache, WhatAnInstallationBringsIsAsSafeAsItsProgram) {
  KernelCache(root_).publish("k", contents_of("k"), report_of("k"));
  const fs::path image = dir_ / "program";
  write_new_file(image, "code");
  const KernelCache shipped(root_, image);
  const auto all_modes = [&](int directories, int files) {
    ::chmod(root_.c_str(), directories), ::chmod((root_ / "k").c_str(), directories);
    for (const auto& file : fs::directory_iterator(root_ / "k")) ::chmod(file.path().c_str(), files);
  };
  all_modes(0775, 0664);
  ::chmod(image.c_str(), 0755);
  EXPECT_NE(error_of([&] { shipped.find("k"); }).find("may be written by other users"), std::string::npos);
  ::chmod(image.c_str(), 0775);
  EXPECT_TRUE(shipped.find("k"));
  EXPECT_THROW(KernelCache(root_).find("k"), Error);
  ::chmod((root_ / "k/report.json").c_str(), 0666);
  EXPECT_FALSE(shipped.find("k"));
  EXPECT_TRUE(fs::exists(root_ / "k"));  // nothing is removed there
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  all_modes(0755, 0644);
  ASSERT_EQ(::chown(root_.c_str(), 65534, 65534), 0);
  const std::string said = error_of([&] { shipped.find("k"); });
  EXPECT_NE(said.find("(uid 65534)"), std::string::npos) << said;
  EXPECT_NE(said.find("install the package as root or as yourself"), std::string::npos) << said;
  ASSERT_EQ(::chown(image.c_str(), 65534, 65534), 0);
  EXPECT_TRUE(shipped.find("k"));
}

TEST_F(Cache, ReadOnlyCacheServesAndSaysThatItCannotStore) {
  const KernelCache cache(root_);
  cache.publish("good", contents_of("good"), report_of("good"));
  cache.publish("damaged", contents_of("damaged"), report_of("damaged"));
  fs::resize_file(root_ / "damaged/kernel.cubin", 1);
  for (const auto& item : fs::recursive_directory_iterator(root_))  // for others to read, as its owner would
    ::chmod(item.path().c_str(), item.is_directory() ? 0755 : 0644);
  ::chmod(root_.c_str(), 0555);
  const int status = finish(start([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 77;  // permissions do not bind root
    const auto entry = cache.find("good");
    if (!entry || !whole(*entry, "good")) return 1;
    if (cache.find("damaged")) return 2;
    for (const std::string key : {"new", "damaged"}) {
      const auto publish = [&] { cache.publish(key, contents_of(key), report_of(key)); };
      if (error_of(publish).find("change its permissions") == std::string::npos) return 3;
    }
    cache.sweep();
    return 0;
  }));
  ::chmod(root_.c_str(), 0755);
  if (status == 77) GTEST_SKIP() << "root cannot give up its rights here";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(names().size(), 2u);
}

}  // namespace
}  // namespace hypermla::cache_test
