/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Transfers between pages of a surface and the same pages of its backing file: page n is at byte
 * n * 4096. The kernel reads into frames and writes from them as such; the process' page tables are
 * not walked, and it need not be possible to pin what they show.
 *
 * A transfer is a run of pages, a batch is what one call has asked for; all of a batch is under way
 * at the same time if the file can do that (O_DIRECT).
 *
 * What holds:
 * - a page that is read for the first time comes to the surface when its data is there, and not at
 *   all if it could not be read;
 * - a page that is on the surface and takes part is held: it can be neither freed nor reused;
 * - a batch outlives its caller, who may be killed while it is under way: a file system that waits
 *   for a server (FUSE, NFS) may never give an answer. A wait inside the file system's own
 *   read_iter or write_iter is the file system's: that is where a cached file is read, for example.
 */
#ifndef VELLUM_EXMAP_TRANSFER_H
#define VELLUM_EXMAP_TRANSFER_H

#include <linux/completion.h>
#include <linux/bvec.h>
#include <linux/list.h>
#include <linux/workqueue.h>

#include "exmap/exmap.h"

enum transfer_kind {
	TRANSFER_FILL,		/* read into frames that then come to the surface */
	TRANSFER_REFRESH,	/* read into pages that are there */
	TRANSFER_WRITE,		/* write pages that are there */
};

struct transfer {
	struct kiocb		kiocb;
	struct transfer_batch	*batch;
	struct list_head	node;
	struct exmap_result	*result;	/* of the range that it is part of */
	enum transfer_kind	kind;
	u64			page;
	unsigned int		count;
	long			outcome;	/* bytes, or an error */
	struct bio_vec		*pages;
};

/* The end of the last transfer and a killed caller each try to be the first. */
enum batch_state {
	BATCH_WAITED_FOR,
	BATCH_DONE,		/* the caller concludes, or has its work do it */
	BATCH_ABANDONED,	/* the end of the last transfer has the batch's work do it */
};

struct transfer_batch {
	struct exmap		*exmap;
	unsigned int		index;		/* of the interface, whose lock is held */
	struct frame_bundle	bundle;		/* of its lane */
	struct list_head	transfers;
	atomic_t		left;
	/* Called when all transfers have an outcome, in any context; NULL: the caller waits. */
	void			(*finished)(struct transfer_batch *batch);
	enum batch_state	state;		/* changes once, by compare-and-exchange */
	struct completion	done;
	bool			holds;		/* pages of the surface */
	bool			over_zeros;	/* a page that showed zeros has a frame now */
	bool			has_gap;	/* what came may not be the first of its range */
	struct exmap_result	*short_one;	/* the last range of which a transfer fell short */

	/* A transfer of one page, as most are. */
	struct transfer		single;
	struct bio_vec		single_page;

	/* Once the caller was killed. */
	struct work_struct	work;
	struct mm_struct	*mm;		/* NULL: not needed */
	struct exmap_result	nowhere;
};

/* Whether there is a file that can be read, or written. */
bool transfer_is_possible(struct exmap *exmap, bool write);

/* A batch for transfer_finish(), which leaves it with the interface. NULL: there is no memory. */
struct transfer_batch *transfer_batch(struct exmap_interface *interface);

/*
 * Plans a batch for these ranges. What is there already is read again with TRANSFER_REFRESH, and
 * left alone with TRANSFER_FILL.
 */
void transfer_plan(struct transfer_batch *batch, struct exmap *exmap, unsigned int index,
		   enum transfer_kind kind, const struct page_range *ranges,
		   struct exmap_result *results, unsigned int count);

/*
 * The same with TRANSFER_FILL, up to the first range that cannot come as a whole, because a page of
 * it is there or because there is no frame. Returns for how many ranges, that one among them.
 */
unsigned int transfer_plan_new(struct transfer_batch *batch, struct exmap *exmap,
			       unsigned int index, const struct page_range *ranges,
			       struct exmap_result *results, unsigned int count);

/*
 * Carries the batch out and waits for it. EINTR: the caller is to die, and must not look at the
 * batch or the results.
 */
int transfer_finish(struct transfer_batch *batch);

/*
 * Reads a page that is not there, for a caller who waits: all that a batch would do for it, without
 * one. The interface's lock is held. Returns the page's bytes; 0 it is there, and stays as it is; an
 * error; EAGAIN it takes a batch, and nothing was done.
 */
ssize_t transfer_read_page(struct exmap *exmap, unsigned int index, const struct kiocb *caller,
			   u64 page);

/*
 * Or without waiting: starts it; when it is finished, what needs no lock is done at once, and if
 * something is left the rest with the interface's lock held.
 */
void transfer_start(struct transfer_batch *batch, void (*finished)(struct transfer_batch *));
bool transfer_conclude_quickly(struct transfer_batch *batch);
void transfer_conclude(struct transfer_batch *batch, struct mm_struct *mm);

/* Holds the frame of a page that is there, with the pool's count of holders raised; or NULL. */
struct page *transfer_hold(struct exmap *exmap, u64 number);

#endif /* VELLUM_EXMAP_TRANSFER_H */
