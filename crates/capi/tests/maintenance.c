/* Checks, backups, compactions and other upkeep of a store; prints "ok" at the end. */
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store.h"

static int count_calls(void *argument, uint64_t done, uint64_t total)
{
	int *left = argument;

	CHECK(done <= total || total == 0);
	return --*left == 0;
}

static int keep_total(void *argument, uint64_t done, uint64_t total)
{
	uint64_t *kept = argument;

	CHECK(done <= total);
	*kept = total;
	return 0;
}

static void expect_number(const char *name, const char *number)
{
	vellum_store *store = open_store(name, 0);
	vellum_tree *tree = open_tree(store);
	vellum_reader *reader = reader_of(tree, "number");
	char found[10];
	size_t count;

	CHECK(vellum_reader_read(reader, found, sizeof found, &count) == 0);
	CHECK(count == strlen(number) && memcmp(found, number, count) == 0);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

static void maintenance(void)
{
	vellum_store *store = open_store("kept", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	const char *backups[] = { "full", "one" };
	int left = 1000000;
	struct vellum_backup_options options = { .progress = count_calls, .argument = &left };
	struct vellum_check check;
	struct vellum_backup_options more = { .progress = keep_total };
	vellum_control_socket *socket;
	struct stat before, after;
	uint64_t changed, all;

	write_value(tree, "long", LENGTH, 1);
	CHECK(vellum_tree_put(tree, "number", 6, "one", 3, 0) == 0);
	CHECK(vellum_store_backup(store, "full", NULL) == 0);
	CHECK(vellum_store_backup(store, "full", NULL) == -EEXIST);
	CHECK(vellum_tree_put(tree, "number", 6, "two", 3, 0) == 0);
	options.since = "full";
	CHECK(vellum_store_backup(store, "one", &options) == 0 && left < 1000000);
	more.since = "one";
	more.argument = &changed;
	CHECK(vellum_store_backup(store, "next", &more) == 0);
	more.since = "next";
	more.flags = VELLUM_READ_ALL;
	more.argument = &all;
	CHECK(vellum_store_backup(store, "whole", &more) == 0);
	CHECK(changed < LENGTH && LENGTH < all);
	CHECK(vellum_store_repair_from(store, backups, 2, NULL, NULL) == -EBADMSG);
	backups[0] = "last";
	more.since = NULL;
	CHECK(vellum_store_backup(store, "last", &more) == -EINVAL);
	more.flags = 0;
	CHECK(vellum_store_backup(store, "last", &more) == 0);
	CHECK(vellum_store_repair_from(store, backups, 1, keep_total, &all) == 0 && LENGTH < all);
	CHECK(vellum_store_repair_from(store, backups, 0, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(store, NULL, 1, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(NULL, backups, 1, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(store, backups, 1, count_calls, &(int){ 1 }) == -ECANCELED);
	backups[0] = "full";
	options.since = NULL;
	left = 1;
	options.flags = VELLUM_REPLACE;
	CHECK(vellum_store_backup(store, "full", &options) == -ECANCELED);
	options.flags = VELLUM_UNCHECKED;
	options.bytes_per_second = 1ull << 40;
	left = 1000000;
	CHECK(vellum_store_backup(store, "third", &options) == 0);
	options.flags = 1;
	CHECK(vellum_store_backup(store, "other", &options) == -EINVAL);
	options.flags = 0;
	options.reserved = 1;
	CHECK(vellum_store_backup(store, "other", &options) == -EINVAL);
	CHECK(vellum_store_backup(NULL, "other", NULL) == -EINVAL);
	CHECK(vellum_store_backup(store, NULL, NULL) == -EINVAL);

	CHECK(vellum_store_check(store, 0, NULL, NULL, &check) == 0);
	CHECK(check.pages_checked * 4096 > LENGTH && check.lost_pages == 0);
	CHECK(vellum_store_check(store, VELLUM_FREE_LOST, NULL, NULL, &check) == 0);
	left = 2;
	CHECK(vellum_store_check(store, 0, count_calls, &left, &check) == -ECANCELED);
	left = 2;
	CHECK(vellum_store_check(store, VELLUM_FREE_LOST, count_calls, &left, &check) ==
	      -ECANCELED);
	CHECK(vellum_store_check(store, VELLUM_CREATE, NULL, NULL, &check) == -EINVAL);
	CHECK(vellum_store_check(store, 0, NULL, NULL, NULL) == -EINVAL);

	CHECK(vellum_tree_remove(tree, "long", 4) == 0);
	CHECK(vellum_store_sync(store) == 0 && stat("kept", &before) == 0);
	CHECK(vellum_store_compact(store, NULL, NULL) == 0);
	CHECK(stat("kept", &after) == 0 && after.st_size < before.st_size / 2);
	CHECK(vellum_store_compact(NULL, NULL, NULL) == -EINVAL);

	CHECK(vellum_control_socket_open(store, "full", &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(NULL, "kept", &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(store, NULL, &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(store, "kept", NULL) == -EINVAL);
	CHECK(vellum_control_socket_open(store, "kept", &socket) == 0);
	CHECK(stat("kept.control", &after) == 0 && S_ISSOCK(after.st_mode));
	vellum_control_socket_close(socket);
	vellum_control_socket_close(NULL);
	CHECK(stat("kept.control", &after) == -1 && errno == ENOENT);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);

	CHECK(vellum_restore("first", backups, 1, NULL) == 0);
	expect_number("first", "one");
	expect_number("third", "two");
	CHECK(vellum_restore("second", backups, 2, NULL) == 0);
	expect_number("second", "two");
	CHECK(vellum_restore("second", backups, 2, NULL) == -EEXIST);
	CHECK(vellum_restore("other", backups + 1, 1, NULL) == -EBADMSG);
	CHECK(strstr(vellum_last_error(), "increment"));
	CHECK(vellum_restore("other", backups, 0, NULL) == -EINVAL);
	CHECK(vellum_restore("other", NULL, 1, NULL) == -EINVAL);
	options.reserved = 0;
	CHECK(vellum_restore("other", backups, 2, &options) == -EINVAL);
	options = (struct vellum_backup_options){ .flags = VELLUM_READ_ALL };
	CHECK(vellum_restore("other", backups, 2, &options) == -EINVAL);
}

int main(void)
{
	maintenance();
	puts("ok");
	return 0;
}
