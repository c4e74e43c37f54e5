// SPDX-License-Identifier: GPL-2.0
/*
 * Stored tables: where the blocks of a file are, as root has written it down on the same file
 * system (uapi/vellum/dax.h has the format). They save questions to the file system when a table is
 * made.
 *
 * Nothing in a stored table is believed. What its header says of the file is compared first, and
 * refuses most of what is stale. Then the file system is asked of each run whether the file has
 * these blocks, before the first page of the run gets a leaf. All else is as when the file system
 * names the blocks: what the file loses meanwhile marks pages as stale, and the refresh begins
 * again, and asks again. So a stored table that is stale, damaged or forged shows no block of
 * another file. The order in which it and the changes of the file become durable does not matter,
 * nor does it matter where the device is in memory: it has numbers of blocks.
 *
 * It is read whole before it is looked at, so nothing changes it meanwhile.
 */

#include <linux/bits.h>
#include <linux/cred.h>
#include <linux/dcache.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/namei.h>
#include <linux/path.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/uidgid.h>

#include "dax/dax.h"

#define DAX_STORED_FOLDER	".vellum-tables"

/* Blocks of 4 KiB within 2^64 bytes. */
#define DAX_STORED_BLOCKS	BIT_ULL(64 - PAGE_SHIFT)

struct dax_stored {
	unsigned int			next;		/* the run in which pages were found last */
	bool				is_confirmed;	/* by the file system, this one */
	bool				is_refused;
	u64				pages;		/* that were found since the beginning */
	/* The file, whole. */
	struct vellum_dax_stored	header;
	struct vellum_dax_run		runs[];
};

static unsigned long dax_stored_kib = 32;
module_param(dax_stored_kib, ulong, 0644);
MODULE_PARM_DESC(dax_stored_kib, "KiB of the shortest file whose stored table is looked for");

static atomic64_t dax_stored_used, dax_stored_refused;

/* The kernel's rights: a user who may open a file need not be able to read its stored table. */
static const struct cred *dax_stored_rights;

/* Reading. */

static bool dax_stored_is_roots(const struct inode *inode)
{
	return uid_eq(inode->i_uid, GLOBAL_ROOT_UID) && !(inode->i_mode & 0022);
}

/* Whether what has failed may succeed another time. */
static bool dax_stored_may_be_there(long error)
{
	return error == -ENOMEM || error == -EINTR || error == -EWOULDBLOCK;
}

/* What has this name in a folder of root's, and is of this kind and root's. NULL: there is none. */
static struct dentry *dax_stored_look_up(struct dentry *folder, const char *name, umode_t kind)
{
	struct dentry *found = lookup_positive_unlocked(name, folder, strlen(name));

	if (IS_ERR(found))
		return dax_stored_may_be_there(PTR_ERR(found)) ? found : NULL;
	if ((d_inode(found)->i_mode & S_IFMT) == kind && dax_stored_is_roots(d_inode(found)))
		return found;
	atomic64_inc(&dax_stored_refused);
	dput(found);
	return NULL;
}

static struct dentry *dax_stored_find_file(const struct inode *inode)
{
	struct dentry *folder, *found;
	char name[24];

	folder = dax_stored_look_up(inode->i_sb->s_root, DAX_STORED_FOLDER, S_IFDIR);
	if (IS_ERR_OR_NULL(folder))
		return folder;
	snprintf(name, sizeof(name), "%lu", inode->i_ino);
	found = dax_stored_look_up(folder, name, S_IFREG);
	dput(folder);
	return found;
}

static struct dax_stored *dax_stored_read(struct file *source)
{
	loff_t length = i_size_read(file_inode(source)), position = 0;
	struct dax_stored *stored;
	ssize_t read;
	u64 runs;

	if (length < sizeof(stored->header))
		return ERR_PTR(-EINVAL);
	runs = (length - sizeof(stored->header)) / sizeof(stored->runs[0]);
	if (runs > VELLUM_DAX_STORED_RUNS || length % sizeof(stored->runs[0]))
		return ERR_PTR(-EINVAL);
	stored = kvzalloc(struct_size(stored, runs, runs), GFP_KERNEL_ACCOUNT);
	if (!stored)
		return ERR_PTR(-ENOMEM);
	read = kernel_read(source, &stored->header, length, &position);
	if (read == length && stored->header.runs == runs)
		return stored;
	kvfree(stored);
	if (fatal_signal_pending(current))
		read = -EINTR;
	return ERR_PTR(read < 0 ? read : -EINVAL);
}

static u64 dax_stored_add(u64 sum, const void *part, size_t length)
{
	const u64 *words = part;
	size_t i;

	for (i = 0; i < length / sizeof(*words); i++)
		sum = (sum ^ words[i]) * VELLUM_DAX_STORED_PRIME;
	return sum;
}

static u64 dax_stored_sum(const struct dax_stored *stored)
{
	struct vellum_dax_stored header = stored->header;
	u64 sum;

	header.checksum = 0;
	sum = dax_stored_add(0, &header, sizeof(header));
	return dax_stored_add(sum, stored->runs, array_size(header.runs, sizeof(stored->runs[0])));
}

static u64 dax_run_end(const struct vellum_dax_run *run)
{
	return (u64)run->page + run->pages;
}

/* Whether all runs are within the file, and none begins before the end of another. */
static bool dax_stored_is_in_order(const struct dax_stored *stored)
{
	u64 end = DIV_ROUND_UP(stored->header.length, PAGE_SIZE), before = 0;
	const struct vellum_dax_run *run;
	unsigned int i;

	for (i = 0; i < stored->header.runs; i++) {
		run = &stored->runs[i];
		if (!run->pages || run->page < before || dax_run_end(run) > end || !run->block ||
		    run->block >= DAX_STORED_BLOCKS)
			return false;
		before = dax_run_end(run);
	}
	return true;
}

/* Whether it is this file's, as the file is now. */
static bool dax_stored_fits(const struct dax_stored *stored, const struct inode *inode)
{
	const struct vellum_dax_stored *header = &stored->header;
	const u8 *uuid = inode->i_sb->s_uuid.b;

	return header->magic == VELLUM_DAX_STORED_MAGIC &&
	       header->version == VELLUM_DAX_STORED_VERSION && !header->reserved &&
	       header->inode == inode->i_ino && header->generation == inode->i_generation &&
	       header->length == i_size_read(inode) &&
	       !memcmp(&header->uuid_first, uuid, sizeof(u64)) &&
	       !memcmp(&header->uuid_last, uuid + sizeof(u64), sizeof(u64)) &&
	       header->checksum == dax_stored_sum(stored) && dax_stored_is_in_order(stored);
}

static struct dax_stored *dax_stored_load_for(const struct file *file)
{
	const struct inode *inode = file_inode(file);
	struct path path = { .mnt = file->f_path.mnt };
	struct dax_stored *stored;
	struct file *source;

	path.dentry = dax_stored_find_file(inode);
	if (IS_ERR_OR_NULL(path.dentry))
		return ERR_CAST(path.dentry);
	/* Does not wait for a program that has a lease of it, nor note when it was read. */
	source = dentry_open(&path, O_RDONLY | O_LARGEFILE | O_NONBLOCK | O_NOATIME,
			     dax_stored_rights);
	stored = ERR_CAST(source);
	if (!IS_ERR(source)) {
		stored = dax_stored_read(source);
		fput(source);
	}
	dput(path.dentry);
	if (IS_ERR(stored) && dax_stored_may_be_there(PTR_ERR(stored)))
		return stored;
	if (!IS_ERR(stored) && dax_stored_fits(stored, inode))
		return stored;
	atomic64_inc(&dax_stored_refused);
	if (!IS_ERR(stored))
		kvfree(stored);
	return NULL;
}

struct dax_stored *dax_stored_load(const struct file *file)
{
	const struct cred *before;
	struct dax_stored *stored;

	if ((u64)i_size_read(file_inode(file)) >> 10 < READ_ONCE(dax_stored_kib))
		return NULL;
	before = override_creds(dax_stored_rights);
	stored = dax_stored_load_for(file);
	revert_creds(before);
	return stored;
}

void dax_stored_free(struct dax_stored *stored)
{
	kvfree(stored);
}

/* Using. */

void dax_stored_begin(struct dax_stored *stored)
{
	stored->next = 0;
	stored->is_confirmed = false;
	stored->pages = 0;
}

u64 dax_stored_conclude(struct dax_stored *stored)
{
	if (stored->is_refused)
		return 0;
	atomic64_inc(&dax_stored_used);
	return stored->pages;
}

/* The first run that ends after the page; NULL: there is none, or it does not count. */
static const struct vellum_dax_run *dax_stored_run(struct dax_stored *stored, u64 page)
{
	if (stored->is_refused)
		return NULL;
	if (stored->next && dax_run_end(&stored->runs[stored->next - 1]) > page) {
		stored->next = 0;
		stored->is_confirmed = false;
	}
	while (stored->next < stored->header.runs &&
	       dax_run_end(&stored->runs[stored->next]) <= page) {
		stored->next++;
		stored->is_confirmed = false;
	}
	return stored->next < stored->header.runs ? &stored->runs[stored->next] : NULL;
}

/* Whether the file has the run, in which the page is, as it is stored. */
static bool dax_stored_confirm(struct dax_stored *stored, struct dax_lookup *lookup,
			       const struct vellum_dax_run *run)
{
	if (stored->is_confirmed)
		return true;
	stored->is_confirmed = dax_blocks_are(lookup, run->page, run->pages, run->block);
	if (stored->is_confirmed)
		return true;
	/* After a signal the file system was not asked. */
	if (!fatal_signal_pending(current)) {
		stored->is_refused = true;
		atomic64_inc(&dax_stored_refused);
	}
	return false;
}

/* Finds the first pages in a run. Returns how many. */
static unsigned int dax_stored_take(struct dax_stored *stored, struct dax_table *table,
				    struct dax_lookup *lookup, u64 page, unsigned int count,
				    u64 *frames)
{
	const struct vellum_dax_run *run = dax_stored_run(stored, page);

	if (!run || page < run->page || !dax_stored_confirm(stored, lookup, run))
		return 0;
	count = min_t(u64, count, dax_run_end(run) - page);
	dax_blocks_place(table, run->block + page - run->page, count, frames);
	stored->pages += count;
	return count;
}

/* The number of pages from this one on, in no run. */
static unsigned int dax_stored_lacks(struct dax_stored *stored, u64 page, unsigned int count)
{
	const struct vellum_dax_run *run = dax_stored_run(stored, page);

	return run ? min_t(u64, count, run->page - page) : count;
}

int dax_stored_find(struct dax_stored *stored, struct dax_table *table, struct dax_lookup *lookup,
		    u64 page, unsigned int count, u64 *frames)
{
	unsigned int i, found;
	int error = 0;

	for (i = 0; !error && i < count; i += found) {
		found = dax_stored_take(stored, table, lookup, page + i, count - i, frames + i);
		if (fatal_signal_pending(current))
			return -EINTR;
		if (found)
			continue;
		found = dax_stored_lacks(stored, page + i, count - i);
		error = dax_blocks_find(table, lookup, page + i, found, frames + i);
	}
	return error;
}

/* Counting. */

void dax_stored_count(struct vellum_dax_tables *counts)
{
	counts->stored_used = atomic64_read(&dax_stored_used);
	counts->stored_refused = atomic64_read(&dax_stored_refused);
}

int dax_stored_start(void)
{
	dax_stored_rights = prepare_kernel_cred(&init_task);
	return dax_stored_rights ? 0 : -ENOMEM;
}

void dax_stored_end(void)
{
	put_cred(dax_stored_rights);
}
