/* SPDX-License-Identifier: GPL-2.0 */
/*
 * All mounts of a tree that several processes share. A thread that takes leaves off the tree
 * flushes for all of them.
 *
 * A detached mount needs no flush: it was flushed when it was detached, and it finds the current
 * leaves when it is attached again.
 */
#ifndef VELLUM_PT_MOUNTS_H
#define VELLUM_PT_MOUNTS_H

#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/types.h>

struct mm_struct;
struct pt_mount;

struct pt_mounts {
	struct mutex		lock;	/* protects all below; taken before a mount's lock */
	struct rb_root		tree;	/* by process: the mounts of a process are in a row */
	u64			count;
};

void pt_mounts_init(struct pt_mounts *mounts);
/*
 * `process` owns the page tables that the mount goes into. They exist until the mount is removed.
 */
void pt_mounts_add(struct pt_mounts *mounts, struct pt_mount *mount, struct mm_struct *process);
void pt_mounts_remove(struct pt_mounts *mounts, struct pt_mount *mount);

/* These flush each process once, however often it has the pages mounted. */
/* Flushes translations of the pages. */
void pt_mounts_flush(struct pt_mounts *mounts, u64 page, u64 count);
/* Flushes translations of the pages, and what the CPUs cache of the tables above. */
void pt_mounts_flush_tables(struct pt_mounts *mounts, u64 page, u64 count);
/*
 * After a flush, makes the secondary MMUs of all processes that have the pages mounted forget them.
 * May sleep. False: not all of them could be told.
 */
bool pt_mounts_tell_secondary(struct pt_mounts *mounts, u64 page, u64 count);
/* No process has anything mapped when this returns. A fault attaches a mount again. */
void pt_mounts_detach(struct pt_mounts *mounts);
/* A fault attaches barred mounts again. */
void pt_mounts_unbar(struct pt_mounts *mounts);
/* The number of mounts that are barred. */
u64 pt_mounts_barred(struct pt_mounts *mounts);
/* For self-checks: counts wrong entries in processes. */
u64 pt_mounts_wrong(struct pt_mounts *mounts);

#endif /* VELLUM_PT_MOUNTS_H */
