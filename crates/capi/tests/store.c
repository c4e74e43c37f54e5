/* Trees, values of any length and misuse, in a store; prints "ok" at the end. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store.h"

static void streams(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	uint64_t lengths[] = { 0, 1, 100, 5000, 300000, LENGTH };
	unsigned char bytes[1000];
	vellum_reader *reader, *old;
	vellum_writer *writer;
	size_t count;

	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		write_value(tree, "key", lengths[i], i);
		reader = reader_of(tree, "key");
		expect(reader, lengths[i], i);
		vellum_reader_close(reader);
	}
	reader = reader_of(tree, "key");
	for (uint64_t offset = LENGTH - 1; offset > 100; offset = offset / 3) {
		size_t most = LENGTH - offset < sizeof bytes ? LENGTH - offset : sizeof bytes;

		CHECK(vellum_reader_read_at(reader, offset, bytes, sizeof bytes, &count) == 0);
		CHECK(count == most && is_made(bytes, offset, count, 5));
	}
	CHECK(vellum_reader_read_at(reader, LENGTH, bytes, 1, &count) == 0 && count == 0);
	CHECK(vellum_reader_read_at(reader, UINT64_MAX, bytes, 1, &count) == 0 && count == 0);
	/* Its position has not changed: it is at the beginning. */
	expect(reader, LENGTH, 5);

	/* The reader keeps its value, even if the key changes. */
	old = reader_of(tree, "key");
	writer = begin(tree, "key", LENGTH, 9);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == -EEXIST);
	vellum_writer_close(writer);
	write_value(tree, "key", LENGTH, 10);
	CHECK(vellum_tree_remove(tree, "key", 3) == 0);
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == -ENODATA);
	expect(old, LENGTH, 5);
	vellum_reader_close(old);
	vellum_reader_close(reader);

	/* A writer that is closed before it is finished stores nothing. */
	vellum_writer_close(begin(tree, "key", LENGTH, 1));
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == -ENODATA);
	writer = begin(tree, "key", LENGTH, 2);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == 0);
	vellum_writer_close(writer);
	CHECK(vellum_store_sync(store) == 0);

	/* The pool shrinks, and grows again. The value is longer than it is. */
	CHECK(vellum_store_resize_pool(store, POOL / 2) == 0);
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == 0);
	vellum_reader_close(reader);
	CHECK(vellum_store_resize_pool(store, POOL) == 0);
	CHECK(vellum_store_resize_pool(store, 2 * POOL) == -EINVAL);
	CHECK(vellum_store_resize_pool(store, 4096) == -EINVAL);
	CHECK(vellum_store_resize_pool(NULL, POOL) == -EINVAL);
	vellum_tree_close(tree);
}

static void entries(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	unsigned char *large = malloc(3 * POOL);
	vellum_reader *reader;
	char bytes[10];
	size_t count;

	CHECK(vellum_tree_put(tree, "a", 1, "one", 3, 0) == 0);
	CHECK(vellum_tree_put(tree, "a", 1, "two", 3, VELLUM_NEW) == -EEXIST);
	CHECK(vellum_tree_put(tree, "a", 1, "three", 5, 0) == 0);
	CHECK(vellum_tree_put(tree, NULL, 0, NULL, 0, VELLUM_NEW) == 0);
	reader = reader_of(tree, "a");
	CHECK(vellum_reader_read(reader, bytes, sizeof bytes, &count) == 0 && count == 5);
	CHECK(memcmp(bytes, "three", 5) == 0);
	vellum_reader_close(reader);
	CHECK(vellum_tree_remove(tree, "", 0) == 0);
	CHECK(vellum_tree_remove(tree, "", 0) == -ENODATA);
	CHECK(strstr(vellum_last_error(), "no such key"));

	/* A value that is longer than the pool. */
	CHECK(large);
	make(large, 0, 3 * POOL, 7);
	CHECK(vellum_tree_put(tree, "large", 5, large, 3 * POOL, VELLUM_NEW) == 0);
	CHECK(vellum_tree_put(tree, "large", 5, large, 3 * POOL, VELLUM_NEW) == -EEXIST);
	free(large);
	reader = reader_of(tree, "large");
	expect(reader, 3 * POOL, 7);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
}

/* Wrong arguments, and calls in the wrong order. */
static void misuse(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	struct vellum_store_options options = { .flags = 128 };
	vellum_store *other = store;
	vellum_tree *none = NULL;
	vellum_reader *reader = NULL;
	vellum_writer *writer = NULL;
	char *long_key = calloc(1, 100000);
	char byte = 0;
	size_t count = 77;

	CHECK(vellum_store_open(NULL, NULL, &other) == -EINVAL);
	CHECK(vellum_store_open("x", NULL, NULL) == -EINVAL);
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_CREATE | VELLUM_READ_ONLY;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_CREATE | 8u;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_NO_LOG | VELLUM_READ_ONLY;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = 0;
	options.reserved = 1;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.reserved = 0;
	options.pool_bytes = 1;
	CHECK(vellum_store_open("main", &options, &other) == -EBUSY);
	CHECK(vellum_store_open("none", NULL, &other) == -ENOENT);
	options.flags = VELLUM_CREATE;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL && other == store);
	options.pool_bytes = UINT64_MAX;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL && other == store);
	CHECK(vellum_store_sync(NULL) == -EINVAL && vellum_store_close(NULL) == 0);

	CHECK(vellum_tree_open(NULL, "t", 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, NULL, 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "\xff", 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "t", VELLUM_NEW, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "t", 0, NULL) == -EINVAL);
	CHECK(vellum_tree_open(store, "none", 0, &none) == -ENOENT && !none);
	CHECK(strstr(vellum_last_error(), "none"));
	vellum_tree_close(NULL);
	CHECK(vellum_tree_put(NULL, "k", 1, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, NULL, 1, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", 1, NULL, 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", SIZE_MAX, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, VELLUM_CREATE) == -EINVAL);
	CHECK(long_key && vellum_tree_put(tree, long_key, 100000, "v", 1, 0) == -ENAMETOOLONG);
	CHECK(vellum_tree_remove(NULL, "k", 1) == -EINVAL);

	CHECK(vellum_reader_open(NULL, "a", 1, &reader) == -EINVAL);
	CHECK(vellum_reader_open(tree, "a", 1, NULL) == -EINVAL);
	CHECK(vellum_reader_open(tree, "none", 4, &reader) == -ENODATA && !reader);
	CHECK(vellum_reader_length(NULL) == 0);
	CHECK(vellum_reader_read(NULL, &byte, 1, &count) == -EINVAL);
	CHECK(vellum_reader_read_at(NULL, 0, &byte, 1, &count) == -EINVAL);
	reader = reader_of(tree, "a");
	CHECK(vellum_reader_read(reader, NULL, 1, &count) == -EINVAL);
	CHECK(vellum_reader_read(reader, &byte, 1, NULL) == -EINVAL);
	CHECK(vellum_reader_read(reader, &byte, SIZE_MAX, &count) == -EINVAL && count == 77);
	CHECK(vellum_reader_read(reader, NULL, 0, &count) == 0 && count == 0);
	CHECK(vellum_reader_read(reader, &byte, 1, &count) == 0 && count == 1 && byte == 't');
	vellum_reader_close(reader);
	vellum_reader_close(NULL);

	CHECK(vellum_writer_open(NULL, "k", 1, &writer) == -EINVAL);
	CHECK(vellum_writer_open(tree, "k", 1, NULL) == -EINVAL);
	CHECK(vellum_writer_open(tree, long_key, 100000, &writer) == -ENAMETOOLONG && !writer);
	CHECK(vellum_writer_write(NULL, "v", 1) == -EINVAL);
	CHECK(vellum_writer_finish(NULL, 0) == -EINVAL);
	CHECK(vellum_writer_length(NULL) == 0);
	CHECK(vellum_writer_open(tree, "k", 1, &writer) == 0);
	CHECK(vellum_writer_write(writer, NULL, 1) == -EINVAL);
	CHECK(vellum_writer_write(writer, NULL, 0) == 0);
	CHECK(vellum_writer_write(writer, "v", 1) == 0);
	CHECK(vellum_writer_finish(writer, VELLUM_CREATE) == -EINVAL);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == 0);
	CHECK(vellum_writer_finish(writer, 0) == -EALREADY);
	CHECK(vellum_writer_write(writer, "v", 1) == -EALREADY);
	CHECK(vellum_writer_length(writer) == 0);
	vellum_writer_close(writer);
	vellum_writer_close(NULL);
	vellum_tree_close(tree);
	free(long_key);
}

/* What was committed is there after a process that did not close its store. */
static void recovery(void)
{
	vellum_store *store;
	vellum_transaction *one;
	vellum_tree *tree;
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		store = open_store("logged", VELLUM_CREATE);
		tree = open_tree(store);
		one = begin_transaction(store, 0);
		CHECK(put_in(one, tree, "x", 5, 0) == 0 && vellum_transaction_commit(one) == 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	store = open_store("logged", 0);
	tree = open_tree(store);
	one = begin_transaction(store, 0);
	CHECK(number_in(one, tree, "x") == 5);
	/* It outlives its store. */
	CHECK(vellum_store_close(store) == 0);
	CHECK(put_in(one, tree, "x", 6, 0) == -ESHUTDOWN);
	CHECK(vellum_transaction_commit(one) == -ESHUTDOWN);
	vellum_transaction_close(one);
	vellum_tree_close(tree);
}

struct shared {
	const vellum_reader *reader;
	const vellum_tree *tree;
	int number;
};

/* Reads anywhere, and writes a value of its own. */
static void *work(void *argument)
{
	struct shared *shared = argument;
	unsigned char bytes[5000];
	char key[20];
	size_t count;

	for (int round = 0; round < 50; round++) {
		uint64_t offset = (round * 7919ull + shared->number * 131ull) * 4001 % LENGTH;

		CHECK(vellum_reader_read_at(shared->reader, offset, bytes, sizeof bytes, &count)
		      == 0);
		CHECK(is_made(bytes, offset, count, 3));
	}
	snprintf(key, sizeof key, "thread %d", shared->number);
	write_value(shared->tree, key, 2 * POOL, shared->number);
	return NULL;
}

static void threads(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	vellum_reader *reader;
	struct shared shared[4];
	pthread_t threads[4];
	char key[20];

	write_value(tree, "shared", LENGTH, 3);
	reader = reader_of(tree, "shared");
	for (int i = 0; i < 4; i++) {
		shared[i] = (struct shared){ reader, tree, i };
		CHECK(pthread_create(&threads[i], NULL, work, &shared[i]) == 0);
	}
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	vellum_reader_close(reader);
	for (int i = 0; i < 4; i++) {
		snprintf(key, sizeof key, "thread %d", i);
		reader = reader_of(tree, key);
		expect(reader, 2 * POOL, i);
		vellum_reader_close(reader);
	}
	vellum_tree_close(tree);
}

/* Handles that outlive their store. */
static void after_close(void)
{
	const char *keys[] = { "short", "whole", "pieces" };
	uint64_t lengths[] = { 10, 5000, LENGTH };
	vellum_store *store = open_store("closed", VELLUM_CREATE), *again;
	vellum_tree *tree = open_tree(store), *other;
	vellum_reader *readers[3], *reader;
	vellum_writer *writer, *late;
	unsigned char bytes[100];
	size_t count;

	for (int i = 0; i < 3; i++) {
		write_value(tree, keys[i], lengths[i], i);
		readers[i] = reader_of(tree, keys[i]);
	}
	writer = begin(tree, "new", LENGTH, 1);
	CHECK(vellum_store_close(store) == 0);
	again = open_store("closed", 0);
	for (int i = 0; i < 3; i++) {
		CHECK(vellum_reader_length(readers[i]) == lengths[i]);
		CHECK(vellum_reader_read(readers[i], bytes, 100, &count) == -ESHUTDOWN);
		CHECK(vellum_reader_read_at(readers[i], 5, bytes, 1, &count) == -ESHUTDOWN);
	}
	CHECK(strstr(vellum_last_error(), "closed"));
	CHECK(vellum_writer_finish(writer, 0) == -ESHUTDOWN);
	CHECK(vellum_reader_open(tree, "short", 5, &reader) == -ESHUTDOWN);
	CHECK(vellum_writer_open(tree, "short", 5, &late) == -ESHUTDOWN);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, 0) == -ESHUTDOWN);
	/* The tree first: what was made of it needs it no more. */
	vellum_tree_close(tree);
	vellum_writer_close(writer);
	for (int i = 0; i < 3; i++)
		vellum_reader_close(readers[i]);
	other = open_tree(again);
	CHECK(vellum_reader_open(other, "new", 3, &reader) == -ENODATA);
	for (int i = 0; i < 3; i++) {
		reader = reader_of(other, keys[i]);
		expect(reader, lengths[i], i);
		vellum_reader_close(reader);
	}
	vellum_tree_close(other);
	CHECK(vellum_store_close(again) == 0);
}

static void read_only(void)
{
	vellum_store *store = open_store("closed", VELLUM_READ_ONLY);
	vellum_store *second = open_store("closed", VELLUM_READ_ONLY);
	vellum_tree *tree;
	vellum_reader *reader;
	vellum_writer *writer;

	CHECK(vellum_tree_open(store, "other", VELLUM_CREATE, &tree) == -EROFS);
	CHECK(vellum_tree_open(store, "t", 0, &tree) == 0);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, 0) == -EROFS);
	CHECK(vellum_writer_open(tree, "k", 1, &writer) == -EROFS);
	reader = reader_of(tree, "pieces");
	expect(reader, LENGTH, 2);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0 && vellum_store_close(second) == 0);
}

/* Values of 23 times the pool, many times, in a file that keeps its length: no space is lost. */
static void space(void)
{
	vellum_store *store = open_store("space", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	struct stat found;

	for (int round = 0; round < 10; round++) {
		write_value(tree, "key", LENGTH, round);
		vellum_writer_close(begin(tree, "other", LENGTH, round));
	}
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
	CHECK(stat("space", &found) == 0 && (uint64_t)found.st_size < 3 * LENGTH);
}

int main(void)
{
	vellum_store *store;

	CHECK(strcmp(vellum_last_error(), "") == 0);
	store = open_store("main", VELLUM_CREATE);
	streams(store);
	entries(store);
	misuse(store);
	threads(store);
	CHECK(vellum_store_close(store) == 0);
	recovery();
	after_close();
	read_only();
	space();
	puts("ok");
	return 0;
}
