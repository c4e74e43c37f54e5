/* Commits that return before they are durable; prints "ok" at the end. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vellum.h"

#define LAST_ERROR vellum_last_error
#include "check.h"

#define MANY 1000

/* What the functions were told. Children have it in common with their parent. */
struct told {
	atomic_int durable[MANY];
	atomic_int unknown[MANY];
	atomic_int words;
	pthread_t thread;
};

struct one {
	struct told *told;
	unsigned int number;
};

static struct told *new_told(void)
{
	struct told *told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE,
				 MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(told != MAP_FAILED);
	return told;
}

/* Each is told once. */
static void is_durable(void *argument, int error)
{
	struct one *one = argument;

	if (error) {
		atomic_fetch_add(&one->told->words, *vellum_last_error() != '\0');
		atomic_fetch_add(&one->told->unknown[one->number], 1);
	} else {
		one->told->thread = pthread_self();
		atomic_fetch_add(&one->told->durable[one->number], 1);
	}
	free(one);
}

static vellum_store *open_store(const char *name, uint32_t flags)
{
	struct vellum_store_options options = { .pool_bytes = 4 << 20, .flags = flags };
	vellum_store *store = NULL;

	CHECK(vellum_store_open(name, &options, &store) == 0 && store);
	return store;
}

static vellum_tree *open_tree(const vellum_store *store)
{
	vellum_tree *tree = NULL;

	CHECK(vellum_tree_open(store, "t", VELLUM_CREATE, &tree) == 0 && tree);
	return tree;
}

/* A transaction that puts a number. */
static vellum_transaction *change(const vellum_store *store, const vellum_tree *tree,
				  unsigned int number, uint32_t flags)
{
	vellum_transaction *transaction = NULL;

	CHECK(vellum_transaction_begin(store, flags, &transaction) == 0);
	CHECK(vellum_transaction_put(transaction, tree, &number, sizeof number, "v", 1, 0) == 0);
	return transaction;
}

static struct one *new_one(struct told *told, unsigned int number)
{
	struct one *one = malloc(sizeof *one);

	CHECK(one);
	*one = (struct one){ told, number };
	return one;
}

/* Commits, frees the transaction at once, and returns the error of the commit. */
static int commit_then(vellum_transaction *transaction, struct told *told, unsigned int number)
{
	struct one *one = new_one(told, number);
	int error = vellum_transaction_commit_then(transaction, is_durable, one);

	if (error)
		free(one);
	vellum_transaction_close(transaction);
	return error;
}

static void commit_many(const vellum_store *store, const vellum_tree *tree, struct told *told)
{
	for (unsigned int i = 0; i < MANY; i++)
		CHECK(commit_then(change(store, tree, i, i % 2 ? VELLUM_NO_SYNC : 0), told, i) == 0);
}

static void expect_all_durable(struct told *told)
{
	for (unsigned int i = 0; i < MANY; i++)
		CHECK(told->durable[i] == 1 && told->unknown[i] == 0);
}

static unsigned int count_entries(const vellum_store *store, const vellum_tree *tree)
{
	vellum_transaction *transaction;
	unsigned int count = 0;
	size_t length;
	char value;

	CHECK(vellum_transaction_begin(store, 0, &transaction) == 0);
	for (unsigned int i = 0; i < MANY; i++)
		count += vellum_transaction_get(transaction, tree, &i, sizeof i, &value, 1,
						&length) == 0;
	vellum_transaction_close(transaction);
	return count;
}

/* A thousand commits are under way at once; to close the store is to end them. */
static void closed_meanwhile(void)
{
	vellum_store *store = open_store("closed", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	struct told *told = new_told();
	vellum_transaction *late = change(store, tree, MANY, 0);

	commit_many(store, tree, told);
	CHECK(vellum_store_close(store) == 0);
	expect_all_durable(told);
	/* A commit after the end of the store calls nothing. */
	CHECK(commit_then(late, told, 0) == -ESHUTDOWN);
	expect_all_durable(told);
	vellum_tree_close(tree);
}

/* exit() has all of them told, and the store has them. */
static void ended_by_exit(void)
{
	struct told *told = new_told();
	pid_t child = fork();
	vellum_store *store;
	vellum_tree *tree;
	int status;

	CHECK(child >= 0);
	if (child == 0) {
		store = open_store("exited", VELLUM_CREATE);
		tree = open_tree(store);
		commit_many(store, tree, told);
		/* Whether a sanitizer finds them is not the question here. */
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	expect_all_durable(told);
	store = open_store("exited", 0);
	tree = open_tree(store);
	CHECK(count_entries(store, tree) == MANY);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

struct user {
	const vellum_store *store;
	const vellum_tree *tree;
	struct told *told;
};

static void uses_store(void *argument, int error)
{
	struct user *user = argument;

	CHECK(error == 0);
	CHECK(vellum_tree_put(user->tree, "k", 1, "v", 1, 0) == 0);
	CHECK(commit_then(change(user->store, user->tree, 2, 0), user->told, 2) == 0);
}

/* A function changes the store that calls it, and commits. */
static void used(void)
{
	vellum_store *store = open_store("used", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	struct user user = { store, tree, new_told() };
	vellum_transaction *first = change(store, tree, 1, 0);

	CHECK(vellum_transaction_commit_then(first, uses_store, &user) == 0);
	vellum_transaction_close(first);
	while (user.told->durable[2] == 0)
		usleep(1000);
	CHECK(count_entries(store, tree) == 2);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

/* A commit that changes nothing, or that fails, and one without a log. */
static void told_at_once(void)
{
	vellum_store *store = open_store("unlogged", VELLUM_CREATE | VELLUM_NO_LOG);
	vellum_tree *tree = open_tree(store);
	vellum_transaction *first = change(store, tree, 1, VELLUM_SNAPSHOT), *reads;
	struct told *told = new_told();
	struct one *one = new_one(told, 5);

	CHECK(commit_then(change(store, tree, 1, 0), told, 1) == 0);
	CHECK(told->durable[1] == 1 && pthread_equal(told->thread, pthread_self()));
	/* Nothing is told of a commit that has failed. */
	CHECK(commit_then(first, told, 2) == -EAGAIN);
	CHECK(vellum_transaction_begin(store, 0, &reads) == 0);
	CHECK(vellum_transaction_commit_then(reads, NULL, one) == -EINVAL);
	CHECK(vellum_transaction_commit_then(reads, is_durable, one) == 0);
	CHECK(told->durable[5] == 1);
	CHECK(vellum_transaction_commit_then(reads, is_durable, told) == -EALREADY);
	vellum_transaction_close(reads);
	CHECK(vellum_transaction_commit_then(NULL, is_durable, told) == -EINVAL);
	CHECK(told->durable[2] == 0 && told->unknown[2] == 0);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

static vellum_commit *start(vellum_transaction *transaction)
{
	vellum_commit *commit = NULL;

	CHECK(vellum_transaction_commit_start(transaction, &commit) == 0 && commit);
	vellum_transaction_close(transaction);
	return commit;
}

static void *wait_for(void *commit)
{
	CHECK(vellum_commit_wait(commit, -1) == 0);
	return NULL;
}

/* Handles: waited for by several threads, only looked at, freed before their end. */
static void handles(void)
{
	vellum_store *store = open_store("handles", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	vellum_commit *commits[MANY], *commit = NULL;
	vellum_transaction *transaction;
	pthread_t threads[2];

	for (unsigned int i = 0; i < MANY; i++)
		commits[i] = start(change(store, tree, i, VELLUM_BUFFERED));
	for (unsigned int i = 0; i < MANY; i += 2)
		vellum_commit_close(commits[i]);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, wait_for, commits[MANY - 1]) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	for (unsigned int i = 1; i < MANY; i += 2) {
		int error = vellum_commit_wait(commits[i], 0);

		/* A function that follows may still have its turn. */
		CHECK(error == 0 || error == -EINPROGRESS);
		CHECK(vellum_commit_wait(commits[i], 60000) == 0);
	}
	transaction = change(store, tree, 1, 0);
	CHECK(vellum_transaction_commit_start(transaction, NULL) == -EINVAL);
	CHECK(vellum_transaction_commit_start(NULL, &commit) == -EINVAL && !commit);
	CHECK(vellum_transaction_commit_start(transaction, &commit) == 0);
	CHECK(vellum_commit_wait(commit, -1) == 0);
	vellum_commit_close(commit);
	commit = NULL;
	CHECK(vellum_transaction_commit_start(transaction, &commit) == -EALREADY && !commit);
	vellum_transaction_close(transaction);
	CHECK(vellum_commit_wait(NULL, 0) == -EINVAL);
	vellum_commit_close(NULL);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
	/* What a handle knows outlives the store. */
	for (unsigned int i = 1; i < MANY; i += 2) {
		CHECK(vellum_commit_wait(commits[i], 0) == 0);
		vellum_commit_close(commits[i]);
	}
}

/* The child of a fork is told nothing, waits for nothing, and may free the handles. */
static void forked(void)
{
	vellum_store *store = open_store("forked", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	vellum_transaction *transaction = change(store, tree, 1, 0);
	vellum_commit *commit = start(change(store, tree, 0, 0));
	struct told *told = new_told();
	pid_t child;
	int status;

	commit_many(store, tree, told);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(vellum_commit_wait(commit, -1) == -ESHUTDOWN);
		vellum_commit_close(commit);
		vellum_transaction_close(transaction);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(vellum_commit_wait(commit, -1) == 0);
	vellum_commit_close(commit);
	vellum_transaction_close(transaction);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
	expect_all_durable(told);
}

/* A log that can no longer write: all are told so, and have the words. */
static void failed(void)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (child == 0) {
		vellum_store *store = open_store("failed", VELLUM_CREATE);
		vellum_tree *tree = open_tree(store);
		struct rlimit none = { 0, 0 };
		struct told *told = new_told();
		vellum_commit *commit;
		int count = 0;

		CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
		CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
		commit = start(change(store, tree, MANY, 0));
		/* A later commit may find the failure itself: then nothing is told of it. */
		while (count < MANY && commit_then(change(store, tree, count, 0), told, count) == 0)
			count++;
		CHECK(vellum_commit_wait(commit, -1) < 0 && *vellum_last_error());
		CHECK(vellum_commit_wait(commit, 0) != -EINPROGRESS);
		vellum_commit_close(commit);
		vellum_tree_close(tree);
		CHECK(vellum_store_close(store) < 0);
		for (int i = 0; i < MANY; i++)
			CHECK(told->durable[i] == 0 && told->unknown[i] == (i < count));
		CHECK(told->words == count);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
	closed_meanwhile();
	ended_by_exit();
	used();
	told_at_once();
	handles();
	forked();
	failed();
	puts("ok");
	return 0;
}
